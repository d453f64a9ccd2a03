"""Small models of Hugging Face's transformers, and their mini-batches."""

import pytest
import torch

from .device.references import computed_on_the_device
from .pinned import Pipeline

tqdm = pytest.importorskip("tqdm").tqdm
transformers = pytest.importorskip("transformers", reason="needs the extra hf")
tqdm.monitor_interval = 0  # its thread outlives the files that a test reads

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


# A pipeline trains without the cache of generation, which moves some bits of the plain model too.
NO_CACHE = {"use_cache": False}


def gpt2(drop=0.0):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2,
            resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop, **NO_CACHE,
        )
    )  # fmt: skip


def llama(drop=0.0, tied=True):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL,
            **NO_CACHE,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            attention_dropout=drop,
        )
    )


def qwen(drop=0.0):
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **SMALL, num_key_value_heads=1, head_dim=16, attention_dropout=drop,
            tie_word_embeddings=False, **NO_CACHE,
        )
    )  # fmt: skip


def bert(drop=0.0):
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            **SMALL, max_position_embeddings=32,
            hidden_dropout_prob=drop, attention_probs_dropout_prob=drop,
        )
    )  # fmt: skip


def vit(drop=0.0):
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **sizes, image_size=16, patch_size=4,
            hidden_dropout_prob=drop, attention_probs_dropout_prob=drop,
        )
    )  # fmt: skip


def t5(drop=0.0):
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
            dropout_rate=drop, decoder_start_token_id=0, pad_token_id=0, **NO_CACHE,
        )
    )  # fmt: skip


def ids(count, length):
    return torch.randint(1, 64, (count, length))


def texts(masked=False, targets=0):
    """Four mini-batches of two lengths; the second half of some texts may be padding."""
    torch.manual_seed(5)
    batches = []
    for length in (10, 7, 10, 10):
        batch = {"input_ids": ids(4, length)}
        if masked:
            keep = torch.ones(4, length, dtype=torch.long)
            keep[:2, length // 2 :] = 0
            # The last mini-batch has no padding, which the model looks at.
            batch["attention_mask"] = keep if len(batches) < 3 else torch.ones_like(keep)
        batch["labels"] = ids(4, targets) if targets else batch["input_ids"]
        batches.append(batch)
    return batches


def pictures():
    torch.manual_seed(6)
    return [
        {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(2, (4,))}
        for _ in range(4)
    ]


MODELS = {
    "gpt2": (gpt2, lambda: texts(masked=True)),
    "llama": (llama, texts),
    "qwen": (qwen, lambda: texts(masked=True)),
    "bert": (bert, lambda: texts(masked=True)),
    "vit": (vit, pictures),
    "t5": (t5, lambda: texts(targets=6)),
}


ADAMW = (torch.optim.AdamW, {"lr": 0.01})


def made(name, **kwargs):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return MODELS[name][0](**kwargs)


def opened(model, data, **kwargs):
    kwargs = {"workers": "serial", "schedule": "1f1b", "example": data[0], **kwargs}
    return Pipeline(model, optimizer=ADAMW, **kwargs)


@computed_on_the_device
def plainly(model, data, epochs=1):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    model.train()
    for batch in data * epochs:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def squares(output, batch):
    return output.logits.square().mean()
