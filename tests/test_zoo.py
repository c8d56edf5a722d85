"""Whole architectures on the meta device: every hidden activation swapped, counted, and put back."""

import pytest
import timm
import torch
import torchvision
from zoo import problems

VIDEO = {"mc3_18", "r2plus1d_18", "r3d_18", "s3d", "mvit_v1_b", "mvit_v2_s", "swin3d_b", "swin3d_s", "swin3d_t"}
# Their code reads values, or builds itself from them, which the meta device does not have.
NOT_ON_META = ("fasterrcnn", "fcos", "keypointrcnn", "maskrcnn", "regnet", "retinanet", "ssd")
TORCHVISION = [name for name in torchvision.models.list_models() if not name.startswith(NOT_ON_META)]
TIMM = timm.list_models()
SAMPLE = [
    *(
        f"torchvision:{name}"
        for name in ("densenet121", "googlenet", "inception_v3", "swin_t", "deeplabv3_resnet50", "s3d")
    ),
    *(f"timm:{name}" for name in ("dm_nfnet_f0", "caformer_s18", "tf_efficientnet_b0", "vit_tiny_patch16_224")),
    *(f"timm:{name}" for name in ("xcit_nano_12_p16_224", "pnasnet5large", "selecsls42", "hgnet_tiny", "levit_128s")),
]


def make(name):
    """A model on the meta device in eval mode, and arguments for it."""
    library, _, name = name.partition(":")
    with torch.device("meta"):
        if library == "timm":
            model = timm.create_model(name)
            return model.eval(), (torch.empty(2, *model.pretrained_cfg.get("input_size", (3, 224, 224))),)
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        if any(part in name for part in ("deeplab", "fcn_", "lraspp")):
            options["weights_backbone"] = None
        model = torchvision.models.get_model(name, weights=None, **options).eval()
        if name in VIDEO:
            return model, (torch.empty(1, 3, 16, 224, 224),)
        if name.startswith("raft"):
            return model, (torch.empty(1, 3, 128, 128), torch.empty(1, 3, 128, 128))
        return model, (torch.empty(2, 3, 224, 224),)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_zoo(name):
    assert problems(*make(name)) == []


@pytest.mark.zoo
@pytest.mark.parametrize("name", [f"torchvision:{name}" for name in TORCHVISION] + [f"timm:{name}" for name in TIMM])
def test_the_whole_zoo(name):
    assert problems(*make(name)) == []
