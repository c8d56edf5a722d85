"""Small models of other people's packages, and inputs for them: each function imports what it needs."""

from __future__ import annotations

import torch


def image(size=64, channels=3, batch=1):
    return torch.randn(batch, channels, size, size)


# --- segmentation, detection, vision ---------------------------------------------------------------------------------


def segmentation_models_pytorch():
    """Encoders and decoders for segmentation."""
    import segmentation_models_pytorch as smp

    for name in ("Unet", "UnetPlusPlus", "FPN", "DeepLabV3Plus", "MAnet", "Linknet", "PSPNet", "PAN"):
        yield name, getattr(smp, name)("resnet18", encoder_weights=None), (image(128, batch=2),)


def ultralytics():
    """YOLO: one activation on the class for all convolutions."""
    from ultralytics.nn.tasks import DetectionModel, SegmentationModel

    yield "yolov8n", DetectionModel("yolov8n.yaml", verbose=False), (image(),)
    yield "yolo11n", DetectionModel("yolo11n.yaml", verbose=False), (image(),)
    yield "yolov8n-seg", SegmentationModel("yolov8n-seg.yaml", verbose=False), (image(),)


def pytorchcv():
    """A second zoo of vision models."""
    from pytorchcv.model_provider import get_model

    for name in ("resnet18", "mobilenetv2_w1", "mobilenetv3_small_w1", "shufflenetv2_wd2", "densenet121", "darknet53",
                 "efficientnet_b0", "squeezenet_v1_1", "igcv3_wd4", "mnasnet_b1", "dla34", "hardnet39ds",
                 "seresnet10", "ghostnet", "peleenet"):  # fmt: skip
        yield name, get_model(name), (image(224),)


def efficientnet_pytorch():
    """The first port of EfficientNet, with a Swish of its own."""
    from efficientnet_pytorch import EfficientNet

    yield "b0", EfficientNet.from_name("efficientnet-b0"), (image(),)


def facenet_pytorch():
    """Face recognition."""
    from facenet_pytorch import InceptionResnetV1

    yield "InceptionResnetV1", InceptionResnetV1(pretrained=None, classify=False), (image(160),)


def pretrainedmodels():
    """An old zoo."""
    import pretrainedmodels as old

    for name in ("nasnetamobile", "se_resnet50", "dpn68", "bninception", "polynet"):
        yield name, old.__dict__[name](num_classes=1000, pretrained=None), (image(331 if name == "polynet" else 224),)


def resnest():
    """Split attention."""
    from resnest.torch import resnest50

    yield "resnest50", resnest50(pretrained=False), (image(),)


def kornia():
    """Geometry and matching."""
    from kornia.feature import HardNet, HyNet, SOSNet, TFeat

    for cls in (HardNet, HyNet, SOSNet, TFeat):
        yield cls.__name__, cls(pretrained=False), (image(32, 1),)


def vit_pytorch():
    """Vision transformers."""
    from vit_pytorch import SimpleViT, ViT
    from vit_pytorch.cct import CCT
    from vit_pytorch.mobile_vit import MobileViT

    shape = {"image_size": 32, "num_classes": 3, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48}
    yield "ViT", ViT(patch_size=8, **shape), (image(32),)
    yield "SimpleViT", SimpleViT(patch_size=8, **shape), (image(32),)
    yield (
        "CCT",
        CCT(img_size=(32, 32), embedding_dim=32, num_layers=2, num_heads=2, mlp_ratio=2, num_classes=3),
        (image(32),),
    )
    channels = [16, 16, 24, 24, 48, 48, 64, 64, 80, 80, 320]
    yield "MobileViT", MobileViT((64, 64), [32, 40, 48], channels, num_classes=3), (image(),)


def open_clip():
    """Images and text."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=64, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=16, vocab_size=99, width=64, heads=2, layers=2)
    for quick in (False, True):
        yield (
            f"CLIP quick_gelu={quick}",
            CLIP(32, vision, text, quick_gelu=quick),
            (image(32), torch.ones(1, 16).long()),
        )


def monai():
    """Medical imaging."""
    from monai.networks import nets

    volume = torch.randn(1, 1, 32, 32, 32)
    yield "UNet", nets.UNet(3, 1, 2, channels=(4, 8, 16), strides=(2, 2)), (volume,)
    yield "SegResNet", nets.SegResNet(3, init_filters=8, in_channels=1), (volume,)
    yield "DynUNet", nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2]), (volume,)
    yield "VNet", nets.VNet(3, 1, 2), (torch.randn(1, 1, 32, 32, 32),)
    yield "DenseNet", nets.DenseNet(2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2)), (image(64, 1),)
    yield "AttentionUnet", nets.AttentionUnet(2, 1, 2, channels=(4, 8), strides=(2,)), (image(32, 1),)
    yield "SwinUNETR", nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2), (image(64, 1),)


def lpips():
    """A perceptual distance."""
    import lpips as package

    yield "LPIPS", package.LPIPS(net="squeeze", pretrained=False, pnet_rand=True, verbose=False), (image(), image())


# --- audio, graphs, diffusion, tables, physics -----------------------------------------------------------------------


def torchaudio():
    """Speech."""
    from torchaudio import models

    yield "Conformer", models.Conformer(16, 2, 32, 2, 7).eval(), (torch.randn(1, 20, 16), torch.tensor([20]))
    yield "ConvTasNet", models.ConvTasNet(enc_num_feats=16, msk_num_feats=16, msk_num_hidden_feats=16, msk_num_layers=2,
                                          msk_num_stacks=1), (torch.randn(1, 1, 800),)  # fmt: skip
    yield "DeepSpeech", models.DeepSpeech(16), (torch.randn(1, 1, 20, 16),)
    yield "Wav2Letter", models.Wav2Letter(num_classes=5), (torch.randn(1, 1, 4000),)


def encodec():
    """A codec of sound, with an LSTM inside."""
    from encodec.modules import SEANetDecoder, SEANetEncoder

    yield "encoder", SEANetEncoder(n_filters=4, lstm=0), (torch.randn(1, 1, 1280),)
    yield "decoder", SEANetDecoder(n_filters=4, lstm=0), (torch.randn(1, 128, 4),)


def torch_geometric():
    """Graphs, whose messages run from generated code."""
    from torch_geometric.nn import GAT, GCN, GIN, PNAConv
    from torch_geometric.nn.models import AttentiveFP

    x, edges = torch.randn(6, 8), torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
    for cls in (GCN, GIN, GAT):
        yield cls.__name__, cls(8, 8, 2, act="relu"), (x, edges)
    yield "AttentiveFP", AttentiveFP(8, 8, 2, 3, 2, 2), (x, edges, torch.randn(5, 3), torch.zeros(6).long())
    yield "PNAConv", PNAConv(8, 8, ["mean", "max"], ["identity"], torch.tensor([1, 5]), act="relu", pre_layers=2), (
        x, edges,
    )  # fmt: skip


def diffusers():
    """Denoisers."""
    from diffusers import AutoencoderKL, Transformer2DModel, UNet2DConditionModel, UNet2DModel

    small = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    yield (
        "UNet2D",
        UNet2DModel(
            32,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            **small,
        ),
        (image(32), 1),
    )
    yield "UNet2DCondition", UNet2DConditionModel(
        32, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=16, attention_head_dim=8,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **small,
    ), (image(32, 4), 1, torch.randn(1, 3, 16))  # fmt: skip
    yield (
        "AutoencoderKL",
        AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **small),
        (image(32),),
    )
    yield "Transformer2D", Transformer2DModel(2, 16, in_channels=32, norm_num_groups=8), (image(8, 32),)


def pytorch_tabnet():
    """Attention on tables."""
    from pytorch_tabnet.tab_network import TabNet

    groups = torch.eye(6)
    yield "TabNet", TabNet(6, 2, group_attention_matrix=groups), (torch.randn(8, 6),)


def rtdl_revisiting_models():
    """Networks for tables."""
    from rtdl_revisiting_models import MLP, FTTransformer, ResNet

    yield "MLP", MLP(d_in=6, d_out=1, n_blocks=2, d_block=16, dropout=0.1), (torch.randn(4, 6),)
    dropped = {"dropout1": 0.1, "dropout2": 0.1}
    residual = ResNet(d_in=6, d_out=1, n_blocks=2, d_block=16, d_hidden=None, d_hidden_multiplier=2.0, **dropped)
    yield "ResNet", residual, (torch.randn(4, 6),)
    settings = FTTransformer.get_default_kwargs(n_blocks=1)
    yield "FTTransformer", FTTransformer(n_cont_features=6, cat_cardinalities=[], d_out=1, **settings), (
        torch.randn(4, 6), None,
    )  # fmt: skip


def tab_transformer_pytorch():
    """Transformers for tables."""
    from tab_transformer_pytorch import FTTransformer, TabTransformer

    inputs = (torch.zeros(2, 3).long(), torch.randn(2, 4))
    yield "TabTransformer", TabTransformer(categories=(3, 4, 5), num_continuous=4, dim=16, depth=1, heads=2), inputs
    yield "FTTransformer", FTTransformer(categories=(3, 4, 5), num_continuous=4, dim=16, depth=1, heads=2), inputs


def neuralop():
    """Operators between functions."""
    from neuralop.models import FNO

    yield "FNO", FNO((4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2), (image(16, 1),)


def nflows():
    """Flows."""
    from nflows.nn.nets import MLP, ResidualNet

    yield "ResidualNet", ResidualNet(4, 3, 8), (torch.randn(2, 4),)
    yield "MLP", MLP((4,), (3,), [8, 8]), (torch.randn(2, 4),)


def monotonicnetworks():
    """Networks with a bounded slope."""
    import monotonicnetworks as package

    inner = torch.nn.Sequential(package.LipschitzLinear(4, 8, kind="one"), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    yield "monotonic", package.MonotonicWrapper(inner), (torch.randn(2, 4),)


PACKAGES = [
    segmentation_models_pytorch, ultralytics, pytorchcv, efficientnet_pytorch, facenet_pytorch, pretrainedmodels,
    resnest, kornia, vit_pytorch, open_clip, monai, lpips, torchaudio, encodec, torch_geometric, diffusers,
    pytorch_tabnet, rtdl_revisiting_models, tab_transformer_pytorch, neuralop, nflows, monotonicnetworks,
]  # fmt: skip
