"""Other people's packages: every activation swapped and counted, or refused with the reason; exact undo.

None of them is needed otherwise: those that are not installed are skipped, and say so.
"""

import warnings

import pytest
import torch
from packages import PACKAGES
from zoo import problems

import actswap

REFUSED = {"torchaudio DeepSpeech": "it is a part of the kernel of nn.RNN"}

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_activation_of_a_package(package):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            models = list(package())
        except ImportError as error:
            pytest.skip(f"{package.__name__} is not installed: {error}")
    for name, model, args in models:
        if reason := REFUSED.get(f"{package.__name__} {name}"):
            with pytest.raises(actswap.BlockedSiteError, match=reason):
                actswap.replace(model, "relu", "silu")
        else:
            assert problems(model.eval(), args) == [], name
