"""Small models of families that are built differently, each with a batch."""

import torch


def _words() -> dict[str, torch.Tensor]:
    words = torch.arange(24).reshape(2, 12)
    return {"input_ids": words * 7 % 64, "labels": words * 5 % 64}


def _images() -> dict[str, torch.Tensor]:
    pixels = torch.arange(2.0 * 3 * 16 * 16).sin().reshape(2, 3, 16, 16)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FEW_CLASSES = {"image_size": 16, "patch_size": 4, "num_labels": 3}


def _family(model, config, batch, **options):
    def make():
        import transformers

        transformers.logging.set_verbosity_error()
        return getattr(transformers, model)(getattr(transformers, config)(**options)), batch()

    return make


FAMILIES = {
    # Ties its embedding to its head, and has dropout.
    "gpt2": _family(
        "GPT2LMHeadModel",
        "GPT2Config",
        _words,
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        **ENDS,
    ),
    "bert": _family("BertForMaskedLM", "BertConfig", _words, **SIZES),
    "bert_without_dropout": _family("BertForMaskedLM", "BertConfig", _words, **SIZES, **NO_DROPOUT),
    "mamba": _family(
        "MambaForCausalLM",
        "MambaConfig",
        _words,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        **ENDS,
    ),
    "llama": _family("LlamaForCausalLM", "LlamaConfig", _words, **SIZES, **ENDS),
    # Routes tokens to experts: sorts, counts, gathers and scatters.
    "mixtral": _family(
        "MixtralForCausalLM",
        "MixtralConfig",
        _words,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        **SIZES,
        **ENDS,
    ),
    "t5": _family(
        "T5ForConditionalGeneration",
        "T5Config",
        _words,
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "vit": _family("ViTForImageClassification", "ViTConfig", _images, **SIZES, **FEW_CLASSES),
    "resnet": _family(
        "ResNetForImageClassification",
        "ResNetConfig",
        _images,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=3,
    ),
}
