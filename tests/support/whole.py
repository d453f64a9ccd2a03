"""Models that are no sequence of layers, given whole, and what their training must come to.

The expectations import nothing of the project.
"""

import copy
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from support.device.references import computed_on_the_device
from support.oracle import READS, lags, layer_seed

# -- models -------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """The block of a ResNet-50, as torchvision writes it."""

    def __init__(self, inside, width, stride=1, downsample=None):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A small ResNet of the blocks of a ResNet-50: in-place steps, a reshape at the end."""

    def __init__(self, blocks=(1, 2, 1, 1), width=4, classes=5):
        super().__init__()
        self.inside = width
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._layer(width, blocks[0], 1)
        self.layer2 = self._layer(width * 2, blocks[1], 2)
        self.layer3 = self._layer(width * 4, blocks[2], 2)
        self.layer4 = self._layer(width * 8, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width * 32, classes)

    def _layer(self, width, count, stride):
        downsample = None
        if stride != 1 or self.inside != width * 4:
            downsample = nn.Sequential(
                nn.Conv2d(self.inside, width * 4, 1, stride, bias=False), nn.BatchNorm2d(width * 4)
            )
        first = Bottleneck(self.inside, width, stride, downsample)
        self.inside = width * 4
        return nn.Sequential(first, *[Bottleneck(self.inside, width) for _ in range(count - 1)])

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Residual(nn.Module):
    """Uses its input twice, so that gradients of three uses meet where it is also skipped to."""

    def __init__(self, inside, out):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(inside, out, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.conv2(F.silu(self.conv1(x)))) + self.shortcut(x)


class UNet(nn.Module):
    """Skips from the way down to the way up, over several stages."""

    def __init__(self, width=4, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(width << i, width << i + 1) for i in range(depth))
        self.mid = Residual(width << depth, width << depth)
        self.up = nn.ModuleList(
            Residual((width << i + 1) * 2, width << i) for i in reversed(range(depth))
        )
        self.head = nn.Conv2d(width, 2, 1)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.stem(x)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid(x)
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip * self.gain], dim=1))
        return self.head(x)


class LanguageModel(nn.Module):
    """An LSTM language model with tied embedding, a tuple between layers, and a mask."""

    def __init__(self, words=23, width=6):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.drop = nn.Dropout(0.2)
        self.lower = nn.LSTM(width, width, batch_first=True)
        self.upper = nn.LSTM(width, width, batch_first=True)
        self.project = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, keep=None):
        x = self.drop(self.embed(words))
        x, _state = self.lower(x)
        if keep is not None:
            x = x.masked_fill(~keep.unsqueeze(-1), 0.0)
        x, state = self.upper(x)
        hidden, _cell = state
        x = self.project(x + hidden.transpose(0, 1))
        return {"scores": self.head(x), "keep": keep}


class HeadFirst(LanguageModel):
    """The same with its head registered first, so that the tied weight has the name of the head."""

    def __init__(self):
        super().__init__()
        modules = dict(self._modules)
        self._modules.clear()
        self._modules["head"] = modules.pop("head")
        self._modules.update(modules)
        self.drop.p = 0.0


class Decoder(nn.Module):
    """As in the documentation of torch.distributed.pipelining: modules that may be None, a dict of
    layers, and a value that is given to a layer twice."""

    def __init__(self, words=17, width=8, depth=3):
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, width)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.TransformerDecoderLayer(width, 2, 2 * width, batch_first=True)
                for i in range(depth)
            }
        )
        for layer in self.layers.values():  # no modules, so tests cannot turn them off
            layer.self_attn.dropout = layer.multihead_attn.dropout = 0.0
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, words)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = layer(h, h)
        h = self.norm(h) if self.norm else h
        return self.output(h).clone() if self.output else h


class Deep(nn.Module):
    """Linear layers with a residual, in which autocast uses each weight once."""

    def __init__(self, width=6, depth=5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).float()


class ThreeUses(nn.Module):
    """One weight on three stages: twice in the middle one, as it is in the last."""

    def __init__(self, words=11, width=5):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.first = nn.Linear(width, width)
        self.again = nn.Linear(width, words, bias=False)
        self.again.weight = self.embed.weight
        self.second = nn.Linear(words, width)
        self.third = nn.Linear(width, width)

    def forward(self, words):
        x = self.first(self.embed(words)).tanh()
        scores = self.again(x)
        x = self.second(scores.tanh()) + self.embed(scores.argmax(-1).detach() * 0 + words)
        return self.third(x) @ self.embed.weight.t()


# Code of the user's around the forward of a model, which no stage has as a whole.


def five_layers():
    torch.manual_seed(2)
    return [nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8)]


class Doubled(nn.Sequential):
    """A call of its own around all layers."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Backwards(nn.Sequential):
    """The layers in another order than they stand there."""

    def __iter__(self):
        return reversed(list(self._modules.values()))


class Listed(nn.ModuleList):
    """A list with a forward."""

    def forward(self, x):
        for layer in self:
            x = x + layer(x)
        return x


class Whole(nn.Module):
    """No sequence."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(five_layers())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def wrapped(model):
    """A forward that is put on the model itself."""
    before = model.forward

    @functools.wraps(before)
    def forward(x):
        return before(x) * 0.5

    model.forward = forward
    return model


AROUND = {
    "an own __call__": lambda: Doubled(*five_layers()),
    "an own order": lambda: Backwards(*five_layers()),
    "a list with a forward": lambda: Listed(five_layers()),
    "a forward on a sequence": lambda: wrapped(nn.Sequential(*five_layers())),
    "a forward on a model": lambda: wrapped(Whole()),
    "a forward on a layer": lambda: nn.Sequential(*[wrapped(each) for each in five_layers()]),
}


def masked_loss(output, target):
    losses = F.cross_entropy(output["scores"].transpose(1, 2), target, reduction="none")
    return losses.mean() if output["keep"] is None else losses[output["keep"]].mean()


def words_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


# -- data ---------------------------------------------------------------------------------------


def images(count, channels=3, classes=5, size=16):
    torch.manual_seed(1)
    return [
        (torch.randn(4, channels, size, size), torch.randint(classes, (4,))) for _ in range(count)
    ]


def maps(count):
    torch.manual_seed(2)
    return [(torch.randn(4, 1, 8, 8), torch.randint(2, (4, 8, 8))) for _ in range(count)]


def sentences(count, words=23, lengths=(5, 7)):
    """Of two lengths, one after another, without padding."""
    torch.manual_seed(3)
    shapes = [(4, lengths[i % len(lengths)]) for i in range(count)]
    return [(torch.randint(words, s), torch.randint(words, s)) for s in shapes]


def points(count):
    torch.manual_seed(4)
    return [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(count)]


def masked_sentences(count):
    """As ``(args, kwargs, target)``."""
    return [
        ((x,), {"keep": torch.arange(x.shape[1]).expand(x.shape) < x.shape[1] - 1}, y)
        for x, y in sentences(count)
    ]


# -- what must come out -------------------------------------------------------------------------


def parts_of(item):
    """The arguments, keyword arguments and target of a mini-batch."""
    if isinstance(item, dict):
        return (), item, item
    return (item[0], item[1], item[2]) if len(item) == 3 else ((item[0],), {}, item[1])


def chunks(item, k):
    """A mini-batch cut into micro-batches."""
    if k == 1:
        return [parts_of(item)]

    def cut(value):
        if isinstance(value, torch.Tensor):
            return value.chunk(k)
        if isinstance(value, dict):
            return [dict(zip(value, each)) for each in zip(*map(cut, value.values()))]
        return list(zip(*map(cut, value))) if value else [value] * k

    args, kwargs, target = parts_of(item)
    kwargs_chunks = cut(kwargs) if kwargs else [{}] * k
    return list(zip(cut(args) if args else [()] * k, kwargs_chunks, cut(target)))


class Seeded:
    """Seeds torch before each call of a layer, as a pipeline does."""

    def __init__(self, model, layers, seed):
        self.number, self.calls = 0, {}
        self.handles = [
            model.get_submodule(name).register_forward_pre_hook(self._hook(name, seed))
            for name in layers
        ]

    def _hook(self, name, seed):
        def before(*_):
            calls = self.calls[name] = self.calls.get(name, 0) + 1
            label = name if calls == 1 else f"{name}#{calls}"
            torch.manual_seed(layer_seed(seed, self.number, label))

        return before

    def begin(self, number):
        self.number = number
        self.calls.clear()


@computed_on_the_device
def oracle(
    model,
    stage_of,
    layers,
    data,
    loss_fn,
    make_optimizer,
    *,
    k=1,
    reads="async-1f1b",
    seed=0,
    clip=None,
):
    """Train a copy of a model as its stages would; return its state dict and the losses.

    stage_of: the stage of each parameter, by every name; a tied weight has several. layers: the
    names of the layers, for their seeds. clip: the largest norm, and how the norm of an update is
    found: ``"exact"``; ``"stage"``, that of each stage; or the number D of the updates before it
    whose norms are not known yet, see `estimated`. The rest is as for `support.oracle.oracle`.
    """
    model = copy.deepcopy(model)
    count = 1 + max(max(stages) for stages in stage_of.values())
    w = lags(count)
    optimizer = make_optimizer(model.parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    first_name, owners = {}, {}
    for name, parameter in every.items():
        whole = first_name.setdefault(id(parameter), name)
        owners[whole] = min(owners.get(whole, count), *stage_of[name])
    versions = [{n: p.detach().clone() for n, p in model.named_parameters()}]
    losses, every_norm, seeded = [], [], Seeded(model, layers, seed)
    for t, item in enumerate(data):
        optimizer.zero_grad()
        sums = [{} for _ in range(count)]
        pieces = chunks(item, k)
        samples = [len(target if not isinstance(target, dict) else next(iter(target.values())))
                   for *_, target in pieces]  # fmt: skip
        for i, (args, kwargs, target) in enumerate(pieces):
            m = t * k + i
            leaves, given = {}, {}
            for name, parameter in every.items():
                whole = first_name[id(parameter)]
                owner = owners[whole]
                user = stage_of[name][0] if k > 1 else owner
                version = READS[reads](m, owner, w, k)
                key = (whole, user)
                if key not in leaves:
                    leaf = versions[version][whole].clone()
                    leaves[key] = leaf.requires_grad_(parameter.requires_grad)
                given[name] = leaves[key]
            seeded.begin(m)
            output = functional_call(model, given, args, kwargs, tie_weights=False)
            loss = loss_fn(output, target)
            losses.append(loss.item())
            trained = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
            share = samples[i] / sum(samples)
            gradients = torch.autograd.grad(
                loss * share if share != 1.0 else loss, list(trained.values()), allow_unused=True
            )
            for (name, user), gradient in zip(trained, gradients):
                if gradient is not None:
                    before = sums[user].get(name)
                    sums[user][name] = gradient if before is None else before + gradient
        for name, parameter in model.named_parameters():
            total = None
            for of_stage in reversed(sums):  # from the last stage down to the owner
                if name in of_stage:
                    total = of_stage[name] if total is None else total + of_stage[name]
            parameter.grad = total
        if clip is not None:
            largest, how = clip
            gradients = [
                (owners[n], p.grad) for n, p in model.named_parameters() if p.grad is not None
            ]
            every_norm.append(
                [norm([g for owner, g in gradients if owner >= stage]) for stage in range(count)]
            )
            for stage in range(count):
                mine = [g for owner, g in gradients if owner == stage]
                if mine:
                    if how == "stage":
                        total = norm(mine)
                    elif how == "exact" or stage == 0:
                        total = every_norm[t][0]
                    else:
                        total = estimated(every_norm, t, stage, how)
                    factor = (largest / (total + 1e-6)).clamp(max=1.0)
                    for gradient in mine:
                        gradient.mul_(factor)
        optimizer.step()
        versions.append({n: p.detach().clone() for n, p in model.named_parameters()})
    for handle in seeded.handles:
        handle.remove()
    return model.state_dict(), losses


def estimated(every_norm, t, stage, delay):
    """Return the norm by which a stage clips update t, whose gradients it knows in part.

    every_norm: by update, the norm of the gradients of the stages s.. for every stage s.
    """
    for u in range(t - delay, t - 2 * delay - 1, -1):
        if u >= 0:
            grown = every_norm[u][0] / every_norm[u][stage]
            if math.isfinite(grown):
                return every_norm[t][stage] * grown
    return every_norm[t][stage]


def norm(gradients):
    """As torch.nn.utils.clip_grad_norm_ does it."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@computed_on_the_device
def plainly(model, data, loss_fn, make_optimizer, *, k=1, autocast=None, clip=None):
    """Train a model without dropout in the plainest loop there is."""
    without_dropout(model)
    optimizer, losses = make_optimizer(model.parameters()), []
    for item in data:
        optimizer.zero_grad()
        for args, kwargs, target in chunks(item, k):
            kind = next(model.parameters()).device.type
            with torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
                loss = loss_fn(model(*args, **kwargs), target)
            (loss / k).backward() if k > 1 else loss.backward()
            losses.append(loss.item())
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
    return copy.deepcopy(model.state_dict()), losses


@computed_on_the_device
def evaluated(model, data, loss_fn):
    """The mean loss of a model in eval mode."""
    model.eval()
    with torch.no_grad():
        losses = [
            loss_fn(model(*args, **kwargs), target).item()
            for args, kwargs, target in map(parts_of, data)
        ]
    return sum(losses) / len(losses)
