"""Tiny random models of the transformers library, and inputs for them."""

from __future__ import annotations

import contextlib

import torch
import transformers
from transformers import AutoConfig, AutoModel, PretrainedConfig

TEXT = [
    "bert",
    "gpt2",
    "t5",
    "llama",
    "opt",
    "bloom",
    "albert",
    "bart",
    "big_bird",
    "bigbird_pegasus",
    "biogpt",
    "blenderbot",
    "camembert",
    "canine",
    "cohere",
    "convbert",
    "ctrl",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "falcon",
    "flaubert",
    "fnet",
    "gemma",
    "gemma2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "granite",
    "ibert",
    "led",
    "longformer",
    "longt5",
    "luke",
    "m2m_100",
    "mamba",
    "marian",
    "mbart",
    "megatron-bert",
    "mistral",
    "mixtral",
    "mobilebert",
    "mpnet",
    "mpt",
    "mt5",
    "nystromformer",
    "olmo",
    "openai-gpt",
    "pegasus",
    "persimmon",
    "phi",
    "phi3",
    "plbart",
    "prophetnet",
    "qwen2",
    "qwen3",
    "rembert",
    "roberta",
    "roformer",
    "smollm3",
    "splinter",
    "squeezebert",
    "stablelm",
    "starcoder2",
    "switch_transformers",
    "tapas",
    "umt5",
    "xglm",
    "xlm",
    "xlm-roberta",
    "xlnet",
    "yoso",
]
VISION = [
    "vit",
    "segformer",
    "beit",
    "bit",
    "cvt",
    "data2vec-vision",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "dpt",
    "focalnet",
    "glpn",
    "ijepa",
    "mobilenet_v1",
    "mobilenet_v2",
    "mobilevit",
    "poolformer",
    "pvt",
    "pvt_v2",
    "regnet",
    "resnet",
    "siglip_vision_model",
    "swiftformer",
    "vit_mae",
    "vit_msn",
    "yolos",
]
AUDIO = [
    "wav2vec2",
    "hubert",
    "sew",
    "sew-d",
    "unispeech",
    "unispeech-sat",
    "wavlm",
    "data2vec-audio",
    "wav2vec2-conformer",
]
SPECTRA = ["whisper"]
PAIRS = ["clip", "blip", "chinese_clip", "altclip", "groupvit", "flava", "vilt", "owlvit"]
KINDS = {name: kind for kind, names in
         {"text": TEXT, "vision": VISION, "audio": AUDIO, "spectra": SPECTRA, "pairs": PAIRS}.items()
         for name in names}  # fmt: skip

WIDTH, HEADS, LAYERS, HIDDEN, LENGTH = 32, 4, 2, 48, 64
SIZES = {
    WIDTH: "hidden_size d_model n_embd dim embed_dim embedding_size image_size",
    LAYERS: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_key_value_heads num_local_experts num_experts eos_token_id",
    HEADS: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads",
    HIDDEN: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff n_inner hidden_dim d_inner",
    8: "d_kv head_dim attention_head_size patch_size",
    LENGTH: "max_position_embeddings n_positions max_source_positions max_target_positions",
    16: "num_mel_bins projection_dim",
    99: "vocab_size",
    0: "pad_token_id",
    1: "bos_token_id decoder_start_token_id num_experts_per_tok",
    3: "num_channels",
}


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration, and those in it, made small."""
    for size, names in SIZES.items():
        for name in names.split():
            if type(getattr(config, name, None)) is int:
                with contextlib.suppress(AttributeError, NotImplementedError):  # some are computed from others
                    setattr(config, name, size)
    for inner in list(vars(config).values()):
        if isinstance(inner, PretrainedConfig):
            shrunk(inner)
    return config


def tiny(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model with random weights in eval mode, and its inputs by name."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = shrunk(AutoConfig.for_model(name))
    model = AutoModel.from_config(config).eval()
    ids, kind = torch.randint(3, 90, (2, 12)), KINDS[name]
    if kind == "text":
        decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        return model, {"input_ids": ids, **decoder}
    if kind == "audio":
        return model, {"input_values": torch.randn(1, 2000)}
    if kind == "spectra":
        return model, {"input_features": torch.randn(1, 16, 2 * LENGTH), "decoder_input_ids": ids[:1]}
    size = config.image_size if isinstance(getattr(config, "image_size", None), int) else WIDTH
    pixels = torch.randn(1, 3, size, size)
    return model, {"pixel_values": pixels, **({"input_ids": ids[:1]} if kind == "pairs" else {})}
