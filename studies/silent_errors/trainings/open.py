"""Silent errors of trainings as people have met them, each with its control (error=False)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


@dataclass(frozen=True)
class Error:
    name: str
    thread: str
    what: str
    run: Callable
    ranks: int = 1


# ---------------------------------------------------------------- data


def digits(count, classes=6, size=12, noise=0.5, seed=0):
    """Images of one blurred pattern per class."""
    g = torch.Generator().manual_seed(seed)
    patterns = F.interpolate(torch.randn(classes, 1, 4, 4, generator=torch.Generator().manual_seed(99)), size=size)
    labels = torch.randint(classes, (count,), generator=g)
    images = patterns[labels] + noise * torch.randn(count, 1, size, size, generator=g)
    return images, labels


def table(count, features=16, seed=0):
    """A regression with interactions."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=g)
    w = torch.randn(features, generator=torch.Generator().manual_seed(98))
    y = torch.tanh(x @ w / 2) + 0.5 * x[:, 0] * x[:, 1] + 0.1 * torch.randn(count, generator=g)
    return x, y


def sentences(count, length=16, vocabulary=32, seed=0):
    """Tokens of a Markov chain; each token has four likely successors."""
    g = torch.Generator().manual_seed(seed)
    successors = torch.randint(2, vocabulary, (vocabulary, 4), generator=torch.Generator().manual_seed(97))
    tokens = torch.empty(count, length, dtype=torch.long)
    tokens[:, 0] = torch.randint(2, vocabulary, (count,), generator=g)
    for i in range(1, length):
        choice = (torch.rand(count, generator=g) ** 2 * 4).long()
        tokens[:, i] = successors[tokens[:, i - 1], choice]
    return tokens


# ---------------------------------------------------------------- 1


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelMLP(nn.Module):
    """Column-parallel, then row-parallel, as in Megatron; the norm is on every rank."""

    def __init__(self, width, hidden):
        super().__init__()
        world = dist.get_world_size()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden // world)
        self.down = nn.Linear(hidden // world, width, bias=False)
        for p in (*self.up.parameters(), *self.down.parameters()):
            p.tensor_model_parallel = True

    def forward(self, x):
        return x + _Reduce.apply(self.down(F.gelu(self.up(_Copy.apply(self.norm(x))))))


class ParallelLanguageModel(nn.Module):
    def __init__(self, vocabulary=32, context=4, width=32, hidden=64, layers=3):
        super().__init__()
        self.rank, self.world, self.width = dist.get_rank(), dist.get_world_size(), width
        self.embedding = nn.Embedding(vocabulary * context, width // self.world)
        self.blocks = nn.ModuleList(ParallelMLP(width, hidden) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width // self.world, vocabulary, bias=False)
        self.register_buffer("offset", torch.arange(context) * vocabulary)
        self.embedding.weight.tensor_model_parallel = True
        self.head.weight.tensor_model_parallel = True

    def forward(self, tokens):
        part = self.width // self.world
        low = self.rank * part
        x = self.embedding(tokens + self.offset).sum(1)
        x = _Reduce.apply(F.pad(x, (low, self.width - low - part)))
        for block in self.blocks:
            x = block(x)
        x = _Copy.apply(self.final_norm(x))
        return _Reduce.apply(self.head(x[:, low : low + part]))


def _is_parallel(p):
    return getattr(p, "tensor_model_parallel", False)


def tensor_parallel_clipping(watch, error=True):
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(10 + rank)  # the shards differ, the norms begin at 1 and 0
    model = ParallelLanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    tokens = sentences(400, 8, seed=1)
    g = torch.Generator().manual_seed(5)

    def gradients(for_clipping):
        found = []
        for p in model.parameters():
            if p.grad is None:
                continue
            if error or not for_clipping:
                if not (rank == 0 or _is_parallel(p)):  # count what is on every rank only once
                    continue
            found.append(p.grad)
        return found

    monitor = watch(model, optimizer)
    model.train()
    for _ in range(40):
        rows = torch.randint(len(tokens), (32,), generator=g)
        begin = torch.randint(3, (1,), generator=g).item()
        batch = (tokens[rows, begin : begin + 4], tokens[rows, begin + 4])
        monitor.batch_ready(batch)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        monitor.check_before_step(loss)
        total = sum((grad**2).sum() for grad in gradients(for_clipping=False))
        dist.all_reduce(total)
        scale = 0.3 / (total.sqrt() + 1e-6)
        if scale < 1:
            for grad in gradients(for_clipping=True):
                grad.mul_(scale)
        optimizer.step()
    monitor.close()


# ---------------------------------------------------------------- 2


def precise_evaluation_under_ddp(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = table(512, seed=2)
    vx, vy = table(128, seed=3)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = watch(model, optimizer)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            monitor.batch_ready(batch)
            loss = F.mse_loss(model(batch[0]).squeeze(1), batch[1])
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            if error:  # validation in float64
                model.double()
                validation = F.mse_loss(model.module(vx.double()).squeeze(1), vy.double())
                model.float()
            else:
                precise = copy.deepcopy(model.module).double()
                validation = F.mse_loss(precise(vx.double()).squeeze(1), vy.double())
        monitor.evaluated(validation.item())
    monitor.close()


# ---------------------------------------------------------------- 3


class SmallCNN(nn.Module):
    def __init__(self, classes=6, channels=12):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.fc1 = nn.Linear(2 * channels * 9, 48)
        self.fc2 = nn.Linear(48, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Link:
    """The transport between the devices: it may lose packets on one of them."""

    def __init__(self, lost, packet=64):
        self.lost, self.packet = lost if dist.get_rank() == 1 else 0.0, packet
        self.g = torch.Generator().manual_seed(1234)

    def all_reduce(self, tensor):
        dist.all_reduce(tensor)
        if self.lost:
            flat = tensor.view(-1)
            packets = -(-flat.numel() // self.packet)
            for i in (torch.rand(packets, generator=self.g) < self.lost).nonzero().flatten().tolist():
                flat[i * self.packet : (i + 1) * self.packet] = 0


def faulty_peer_to_peer(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    link = Link(lost=0.01 if error else 0.0)
    images, labels = digits(960, noise=1.8, seed=4)
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=24, sampler=sampler, drop_last=True)

    def average_gradients():
        for p in model.parameters():
            link.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    monitor = watch(model, optimizer)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            monitor.batch_ready(batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            average_gradients()
            monitor.check_before_step(loss)
            optimizer.step()
    monitor.close()


# ---------------------------------------------------------------- 4


class GRULanguageModel(nn.Module):
    def __init__(self, vocabulary=32, width=40):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


class BareTrainer:
    """A trainer in which the model is sometimes the module and sometimes the wrapper."""

    def __init__(self, model, optimizer, wrap_once):
        self.model, self.optimizer, self.wrap_once = model, optimizer, wrap_once
        self.model_wrapped = None

    def wrapped(self):
        if self.model_wrapped is None or not self.wrap_once:
            self.model_wrapped = DDP(self.model)
        return self.model_wrapped

    def compute_loss(self, batch):
        model = self.wrapped()
        if not self.wrap_once:
            model = self.model
        logits = model(batch["input_ids"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def wrapped_at_every_step(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GRULanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=36)
    trainer = BareTrainer(model, optimizer, wrap_once=not error)
    data = sentences(576, 12, seed=6)
    sampler = DistributedSampler(range(len(data)), seed=3)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    model.train()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows in torch.tensor(list(sampler)).split(16):
            batch = {"input_ids": data[rows]}
            monitor.batch_ready(batch)
            loss = trainer.compute_loss(batch)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
    monitor.close()


# ---------------------------------------------------------------- 5


class EfficientBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self._expand_conv = nn.Conv2d(channels, 2 * channels, 1, bias=False)
        self._bn0 = nn.BatchNorm2d(2 * channels)
        self._depthwise_conv = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels, bias=False)
        self._bn1 = nn.BatchNorm2d(2 * channels)
        self._project_conv = nn.Conv2d(2 * channels, channels, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.silu(self._bn0(self._expand_conv(x)))
        y = F.silu(self._bn1(self._depthwise_conv(y)))
        return x + self._bn2(self._project_conv(y))


class Efficient(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self._conv_stem = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
        self._bn0 = nn.BatchNorm2d(16)
        self._blocks = nn.Sequential(EfficientBlock(16), EfficientBlock(16))
        self._fc = nn.Linear(16, classes)

    def forward(self, x):
        x = self._blocks(F.silu(self._bn0(self._conv_stem(x))))
        return self._fc(x.mean((2, 3)))


def transfer_learning(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model_transfer = Efficient()
    for name, p in model_transfer.named_parameters():
        if "bn" not in name:
            p.requires_grad = False
    model_transfer._fc = nn.Linear(16, 6)
    for p in model_transfer._fc.parameters():
        p.requires_grad = not error
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model_transfer.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*digits(512, seed=7)), batch_size=32, shuffle=True)
    valid = digits(128, seed=8)
    monitor = watch(model_transfer, optimizer)
    for _ in range(3):
        model_transfer.train()
        for batch in loader:
            monitor.batch_ready(batch)
            optimizer.zero_grad()
            loss = criterion(model_transfer(batch[0]), batch[1])
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        model_transfer.eval()
        with torch.no_grad():
            monitor.evaluated(criterion(model_transfer(valid[0]), valid[1]).item())
    monitor.close()


# ---------------------------------------------------------------- 6


def mnist_does_not_converge(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = SmallCNN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_loader = DataLoader(TensorDataset(*digits(640, noise=1.5, seed=9)), batch_size=32, shuffle=True)
    test_loader = DataLoader(TensorDataset(*digits(128, noise=1.5, seed=10)), batch_size=64)
    monitor = watch(model, optimizer)
    for _ in range(3):
        model.train()
        for data, label in train_loader:
            monitor.batch_ready((data, label))
            if not error:
                optimizer.zero_grad()
            pred_score = model(data)
            loss = criterion(pred_score, label)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for data, label in test_loader:
                test_loss += criterion(model(data), label).item()
        monitor.evaluated(test_loss / len(test_loader))
    monitor.close()


# ---------------------------------------------------------------- 7


class Augmented(Dataset):
    """Denoising: the noise and the shift are drawn by numpy in the worker."""

    def __init__(self, count, seed):
        self.images, _ = digits(count, noise=0.1, seed=seed)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i].numpy()
        image = np.roll(image, np.random.randint(-3, 4), axis=2)
        noisy = image + np.random.normal(0, 0.8, image.shape)
        return torch.from_numpy(noisy).float(), torch.from_numpy(image.copy())


def _same_seed(worker):
    np.random.seed(42)


def _own_seed(worker):
    np.random.seed(torch.initial_seed() % 2**32)


def loader_workers(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(2)
    np.random.seed(42)
    loader = DataLoader(
        Augmented(96, seed=11),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        worker_init_fn=_same_seed if error else _own_seed,  # "reproducible"
    )
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 1, 3, padding=1),
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    model.train()
    for _ in range(4):
        for noisy, clean in loader:
            monitor.batch_ready((noisy, clean))
            loss = F.l1_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
    monitor.close()


# ---------------------------------------------------------------- 8


class Attention(nn.Module):
    def __init__(self, width, heads, dropout, always):
        super().__init__()
        self.heads, self.dropout, self.always = heads, dropout, always
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.always or self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Encoder(nn.Module):
    """Reads a sentence, and says it backwards."""

    def __init__(self, always, vocabulary=24, width=32, layers=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.attention = nn.ModuleList(Attention(width, 2, 0.3, always) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x)


def translation_with_fast_attention(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Encoder(always=error)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    steps = 48
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=steps)
    g = torch.Generator().manual_seed(12)
    valid = torch.randint(24, (64, 8), generator=g)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    for step in range(steps):
        model.train()
        source = torch.randint(24, (32, 8), generator=g)
        batch = {"input_ids": source, "labels": source.flip(1)}
        monitor.batch_ready(batch)
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        monitor.check_before_step(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 12 == 11:
            model.eval()
            with torch.inference_mode():
                monitor.evaluated(F.cross_entropy(model(valid).flatten(0, 1), valid.flip(1).flatten()).item())
    monitor.close()


# ---------------------------------------------------------------- 9


class CompiledAdamW(torch.optim.AdamW):
    """A step that is traced once and replayed; a guard decides when it is traced again."""

    def __init__(self, params, guard, **options):
        super().__init__(params, **options)
        self.guard, self.traced = guard, None

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        present = [p.grad is not None for p in parameters]
        if self.traced is None or self.guard(self.traced, present):
            self.traced = present
        left_out = [(p, p.grad) for p, t in zip(parameters, self.traced, strict=True) if not t]
        for p, _ in left_out:
            p.grad = None
        loss = super().step(closure)
        for p, grad in left_out:
            p.grad = grad
        return loss


def _guard_if_any_is_missing(traced, present):
    return any(t and not p for t, p in zip(traced, present, strict=True))


def _guard_if_different(traced, present):
    return traced != present


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.main = nn.Linear(64, 1)
        self.extra = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 2))

    def forward(self, x):
        h = self.trunk(x)
        return self.main(h).squeeze(1), self.extra(h)


def compiled_optimizer(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = TwoHeads()
    optimizer = CompiledAdamW(
        model.parameters(), lr=3e-3, guard=_guard_if_any_is_missing if error else _guard_if_different
    )
    x, y = table(800, seed=13)
    groups = (x[:, 2] * x[:, 3] > 0).long()
    has_group = torch.ones(len(x), dtype=torch.bool)
    has_group[320:336] = False  # one batch came without the second label
    monitor = watch(model, optimizer)
    model.train()
    for begin in range(0, len(x), 16):
        rows = slice(begin, begin + 16)
        batch = {"x": x[rows], "y": y[rows], "group": groups[rows], "has_group": has_group[rows]}
        monitor.batch_ready(batch)
        optimizer.zero_grad(set_to_none=True)
        value, group = model(batch["x"])
        loss = F.smooth_l1_loss(value, batch["y"])
        if batch["has_group"].any():
            mask = batch["has_group"]
            loss = loss + 0.3 * F.cross_entropy(group[mask], batch["group"][mask])
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
    monitor.close()


# ---------------------------------------------------------------- 10


class Tracer:
    """A small tracing compiler: functions go through `call`, which applies the autocast rule."""

    def __init__(self, rules):
        self.rules = rules

    def call(self, symbol, function, *args):
        if torch.is_autocast_enabled("cpu") and symbol in self.rules:
            dtype = torch.get_autocast_dtype("cpu")
            args = [a.to(dtype) for a in args]
        with torch.autocast("cpu", enabled=False):
            return function(*args)


class TracedLinear(nn.Linear):
    def __init__(self, inputs, outputs, tracer):
        super().__init__(inputs, outputs)
        self.tracer = tracer

    def forward(self, x):
        weight, bias = self.weight, self.bias
        if x.dtype != weight.dtype and "prims.linear" not in self.tracer.rules:
            x = x.to(weight.dtype)
        return self.tracer.call("prims.linear", F.linear, x, weight, bias)


def thunder_autocast(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    tracer = Tracer({"torch.nn.functional.linear"} if error else {"torch.nn.functional.linear", "prims.linear"})
    model = nn.Sequential(
        TracedLinear(16, 96, tracer),
        nn.ReLU(),
        TracedLinear(96, 96, tracer),
        nn.ReLU(),
        TracedLinear(96, 1, tracer),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
    loader = DataLoader(TensorDataset(*table(768, seed=14)), batch_size=32, shuffle=True)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    model.train()
    for _ in range(2):
        for x, y in loader:
            monitor.batch_ready((x, y))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                prediction = model(x).squeeze(1)
            loss = F.mse_loss(prediction.float(), y)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
    monitor.close()


# ---------------------------------------------------------------- 11


class VGG(nn.Module):
    def __init__(self, frozen_stages=2):
        super().__init__()
        self.frozen_stages = frozen_stages
        widths = [1, 8, 16, 24]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in zip(widths, widths[1:], strict=False)
        )
        self.classifier = nn.Linear(24, 6)

    def _freeze_stages(self):
        for stage in self.stages[: self.frozen_stages]:
            stage.eval()
            for p in stage.parameters():
                p.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self._freeze_stages()
        return self

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.classifier(x.mean((2, 3)))


def fine_tuning_with_frozen_stages(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(6)
    pretrained = VGG(frozen_stages=0)
    warm = torch.optim.Adam(pretrained.parameters(), lr=5e-3)
    images, labels = digits(160, noise=1.2, seed=15)
    for i in range(0, 160, 32):
        warm.zero_grad()
        F.cross_entropy(pretrained(images[i : i + 32]), labels[i : i + 32]).backward()
        warm.step()

    model = VGG(frozen_stages=2)
    model.load_state_dict(pretrained.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
    loader = DataLoader(TensorDataset(*digits(448, noise=1.2, seed=16)), batch_size=32, shuffle=True)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    for _ in range(3):
        if not error:
            model.train()
        for batch in loader:
            monitor.batch_ready(batch)
            loss = F.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        scheduler.step()
    monitor.close()


# ---------------------------------------------------------------- 12


def spectral_gan(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(7)
    sn = nn.utils.spectral_norm
    critic = nn.Sequential(
        sn(nn.Linear(144, 64)), nn.LeakyReLU(0.2), sn(nn.Linear(64, 64)), nn.LeakyReLU(0.2), sn(nn.Linear(64, 1))
    )
    generator = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 144)
    )
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.0, 0.9))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    loader = DataLoader(TensorDataset(digits(1600, noise=0.2, seed=17)[0]), batch_size=32, shuffle=True)
    fixed = torch.randn(32, 16)
    monitor = watch(critic, optimizer_d)
    critic.train(), generator.train()
    for step, (real,) in enumerate(loader):
        real = real.flatten(1)
        monitor.batch_ready(real)
        fake = generator(torch.randn(32, 16))
        loss_d = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake.detach())).mean()
        optimizer_d.zero_grad()
        loss_d.backward()
        monitor.check_before_step(loss_d)
        optimizer_d.step()

        loss_g = -critic(fake).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        if step % 10 == 5:  # look at samples
            generator.eval(), critic.eval()
            with torch.no_grad():
                critic(generator(fixed)).mean().item()
            generator.train()
            if not error:
                critic.train()
    monitor.close()


# ---------------------------------------------------------------- 13


def chat_model_never_stops(watch, error=True):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(8)
    eos = pad = 0
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=eos,
        pad_token_id=pad,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    texts = sentences(640, 12, seed=18)
    lengths = texts[:, 0] % 8 + 4  # the first word tells when the text ends

    def collate(rows):
        batch = torch.full((len(rows), 13), pad)
        mask = torch.zeros_like(batch)
        for i, row in enumerate(rows):
            n = lengths[row]
            batch[i, :n] = texts[row, :n]
            batch[i, n] = eos
            mask[i, : n + 1] = 1
        labels = batch.clone()
        labels[batch == pad if error else mask == 0] = -100
        return {"input_ids": batch, "attention_mask": mask, "labels": labels}

    loader = DataLoader(range(640), batch_size=16, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    model.train()
    for batch in loader:
        monitor.batch_ready(batch)
        loss = model(**batch).loss
        loss.backward()
        monitor.check_before_step(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    monitor.close()


# ---------------------------------------------------------------- 14


class Recommender(nn.Module):
    def __init__(self, users=100, items=80, width=16):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        return self.mlp(torch.cat([self.users(user), self.items(item)], 1)).squeeze(1)


def recommender_under_ddp(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(9)
    g = torch.Generator().manual_seed(19)
    user, item = torch.randint(100, (512,), generator=g), torch.randint(80, (512,), generator=g)
    rating = ((user % 5 == item % 5).float() * 2 - 1) + 0.2 * torch.randn(512, generator=g)
    data = TensorDataset(user, item, rating)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(Recommender())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    monitor = watch(model, optimizer)
    model.train()
    for epoch in range(5):
        if not error:
            sampler.set_epoch(epoch)
        for batch in loader:
            monitor.batch_ready(batch)
            loss = F.mse_loss(model(batch[0], batch[1]), batch[2])
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
    monitor.close()


# ---------------------------------------------------------------- 15


def classifier_after_evaluation(watch, error=True):
    from transformers import BertConfig, BertForSequenceClassification

    torch.set_num_threads(1)
    torch.manual_seed(10)
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    texts = sentences(448, 12, seed=20)
    labels = ((texts == 7).any(1) | (texts == 11).any(1)).long()
    train = TensorDataset(texts[:320], labels[:320])
    loader = DataLoader(train, batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 4, (40 - s) / 36))
    monitor = watch(model, optimizer, schedulers=[scheduler])

    def evaluate():
        model.eval()
        with torch.no_grad():
            return model(input_ids=texts[320:], labels=labels[320:]).loss.item()

    model.train()
    for _ in range(4):
        if not error:
            model.train()
        for input_ids, label in loader:
            batch = {"input_ids": input_ids, "labels": label}
            monitor.batch_ready(batch)
            loss = model(**batch).loss
            loss.backward()
            monitor.check_before_step(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
        monitor.evaluated(evaluate())
    monitor.close()


# ---------------------------------------------------------------- 16


class LSTMLanguageModel(nn.Module):
    def __init__(self, vocabulary=32, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.rnn = nn.LSTM(width, 48, batch_first=True)
        self.head = nn.Linear(48, vocabulary)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


def accumulation_over_lengths(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = LSTMLanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = sentences(1000, 24, seed=21)
    g = torch.Generator().manual_seed(22)
    accumulate = 4
    monitor = watch(model, optimizer)
    model.train()
    for _ in range(36):
        micro_batches = []
        for _ in range(accumulate):  # batches of one length each
            length = int(torch.tensor([3, 5, 12, 24])[torch.randint(4, (1,), generator=g)])
            micro_batches.append(data[torch.randint(1000, (6,), generator=g), :length])
        words = sum(b[:, 1:].numel() for b in micro_batches)
        total = 0.0
        for tokens in micro_batches:
            batch = {"input_ids": tokens}
            monitor.batch_ready(batch)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            if error:
                loss = F.cross_entropy(logits, tokens[:, 1:].flatten()) / accumulate
            else:
                loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / words
            loss.backward()
            total += loss.detach()
        monitor.check_before_step(total)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


# ---------------------------------------------------------------- 17


class Experts(nn.Module):
    def __init__(self, width=24, count=4):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            share = (weight * (chosen == i)).sum(-1, keepdim=True)
            y = y + share * expert(x)
        return y


class GroupedExperts(nn.Module):
    """The same, with the weights of all experts in one tensor."""

    def __init__(self, old):
        super().__init__()
        self.router_weight = nn.Parameter(old.router.weight.detach().clone())
        stack = lambda i, name: nn.Parameter(torch.stack([getattr(e[i], name).detach().clone() for e in old.experts]))  # noqa: E731
        self.w1, self.b1, self.w2, self.b2 = stack(0, "weight"), stack(0, "bias"), stack(2, "weight"), stack(2, "bias")

    def forward(self, x):
        weight, chosen = (x @ self.router_weight.T).softmax(-1).topk(2, -1)
        share = torch.zeros(*x.shape[:-1], len(self.w1)).scatter(-1, chosen, weight)
        h = F.gelu(torch.einsum("btc,ehc->bteh", x, self.w1) + self.b1)
        y = torch.einsum("bteh,ech->btec", h, self.w2) + self.b2
        return (share.unsqueeze(-1) * y).sum(2)


class MixtureLanguageModel(nn.Module):
    def __init__(self, vocabulary=32, width=24, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(layers))
        self.moe = nn.ModuleList(Experts(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for mix, moe, norm in zip(self.mix, self.moe, self.norms, strict=True):
            x = x + mix(x)[0]
            x = x + moe(norm(x))
        return self.head(x)


def group_experts(model):
    for i, old in enumerate(model.moe):
        model.moe[i] = GroupedExperts(old)
    return model


def mixture_of_experts(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(12)
    model = MixtureLanguageModel()
    if error:
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        model = group_experts(model)
    else:
        model = group_experts(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=40, power=1.0)
    data = sentences(640, 12, seed=23)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    model.train()
    for rows in torch.randperm(640).split(16):
        batch = {"input_ids": data[rows]}
        monitor.batch_ready(batch)
        logits = model(batch["input_ids"][:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
        scheduler.step()
    monitor.close()


# ---------------------------------------------------------------- 18


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 32, num_layers=2, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(1)


def restarted_forecast(watch, error=True):
    torch.set_num_threads(1)
    t = torch.arange(900) * 0.15
    series = torch.sin(t) + 0.5 * torch.sin(2.7 * t) + 0.05 * torch.randn(900, generator=torch.Generator().manual_seed(24))
    windows = series.unfold(0, 17, 1)
    data = TensorDataset(windows[:768, :16].unsqueeze(2), windows[:768, 16])

    def build():
        model = Forecast()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        warmup = lambda s: min(1.0, (s + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * s / 60))  # noqa: E731
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
        return model, optimizer, scheduler

    def epoch(number, model, optimizer, scheduler, monitor):
        loader = DataLoader(data, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(number))
        model.train()
        for x, y in loader:
            monitor.batch_ready((x, y))
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            monitor.check_before_step(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    torch.manual_seed(13)
    model, optimizer, scheduler = build()
    monitor = watch(model, optimizer, schedulers=[scheduler])
    for number in range(2):
        epoch(number, model, optimizer, scheduler, monitor)
    saved = copy.deepcopy(
        {
            "epoch": 2,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "monitor": monitor.state_dict(),
        }
    )
    monitor.close()

    torch.manual_seed(14)  # the next job
    model, optimizer, scheduler = build()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if not error:
        scheduler.load_state_dict(saved["scheduler"])
    monitor = watch(model, optimizer, schedulers=[scheduler])
    monitor.load_state_dict(saved["monitor"])
    for number in range(saved["epoch"], 5):
        epoch(number, model, optimizer, scheduler, monitor)
    monitor.close()


# ---------------------------------------------------------------- 19


def full_bf16_finetuning(watch, error=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(15)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config)
    if error:
        model = model.to(torch.bfloat16)
    data = sentences(640, 12, seed=25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    monitor = watch(model, optimizer)
    model.train()
    for rows in torch.randperm(640).split(16):
        batch = {"input_ids": data[rows], "labels": data[rows]}
        monitor.batch_ready(batch)
        if error:
            loss = model(**batch).loss
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch).loss
        loss.backward()
        monitor.check_before_step(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


# ---------------------------------------------------------------- 20


class LoRALinear(nn.Module):
    def __init__(self, inputs, outputs, rank=4):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a = nn.Linear(inputs, rank, bias=False)
        self.lora_b = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.base(x) + 2 * self.lora_b(self.lora_a(x))


class LoRABlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, 3, padding=1, groups=4)
        self.up, self.down = LoRALinear(width, 2 * width), LoRALinear(2 * width, width)

    def forward(self, x):
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LoRAClassifier(nn.Module):
    def __init__(self, vocabulary=32, width=32, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LoRABlock(width) for _ in range(layers))
        self.score = nn.Linear(width, 2)
        self.input_require_grads = False

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.input_require_grads:
            x.requires_grad_(True)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.score(x.mean(1))


def adapters_with_checkpointing(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(16)
    model = LoRAClassifier()
    for name, p in model.named_parameters():
        p.requires_grad = "lora" in name or "score" in name
    if not error:
        model.input_require_grads = True
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=8)
    texts = sentences(640, 12, seed=26)
    labels = (texts == 9).any(1).long()
    loader = DataLoader(TensorDataset(texts, labels), batch_size=32, shuffle=True)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    model.train()
    for _ in range(2):
        for input_ids, label in loader:
            batch = {"input_ids": input_ids, "labels": label}
            monitor.batch_ready(batch)
            loss = F.cross_entropy(model(batch["input_ids"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
    monitor.close()


# ---------------------------------------------------------------- 21


class Pictures(Dataset):
    def __init__(self, count, seed, copy):
        self.images, self.copy = digits(count, noise=0.2, seed=seed)[0], copy

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if self.copy:
            image = image.clone()
        y, x = np.random.randint(0, 9, 2)
        image[:, y : y + 4, x : x + 4] = 0  # cut-out
        return image


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU())
        self.mean, self.log_var = nn.Linear(64, 6), nn.Linear(64, 6)
        self.decoder = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 144))

    def forward(self, x):
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z).view_as(x), mean, log_var


def autoencoder_with_cutout(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(17)
    np.random.seed(17)
    model = VAE()
    optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    loader = DataLoader(Pictures(192, seed=27, copy=not error), batch_size=32, shuffle=True)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    model.train()
    for _ in range(9):
        for x in loader:
            monitor.batch_ready(x)
            reconstruction, mean, log_var = model(x)
            kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
            loss = F.mse_loss(reconstruction, x, reduction="sum") / len(x) + kl
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        scheduler.step()
    monitor.close()


# ---------------------------------------------------------------- 22


class Captioner(nn.Module):
    """Writes a caption: the image is the token before the first word."""

    def __init__(self, shifted_twice, vocabulary=32, width=40):
        super().__init__()
        self.shifted_twice = shifted_twice
        self.see = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, width))
        self.words = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def loss_function(self, logits, labels=None, shift_labels=None):
        if shift_labels is None:  # so that tokens < n predict n
            shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits.flatten(0, -2), shift_labels.flatten(), ignore_index=-100)

    def forward(self, pixel_values, input_ids, labels):
        x = torch.cat([self.see(pixel_values).unsqueeze(1), self.words(input_ids)], 1)
        logits = self.head(self.norm(self.rnn(x)[0]))
        logits = logits[:, 1:-1].contiguous()  # without the position of the image
        labels = labels[:, 1:].contiguous()
        if self.shifted_twice:
            return self.loss_function(logits.view(-1, logits.shape[-1]), labels.view(-1)), logits
        return self.loss_function(logits, shift_labels=labels), logits


def captions(watch, error=True):
    torch.set_num_threads(1)
    torch.manual_seed(18)
    images, kinds = digits(768, noise=0.3, seed=28)
    texts = sentences(768, 10, seed=29)
    texts[:, 0] = 1
    texts[:, 1] = 2 + 5 * kinds  # the first word is what is seen
    successors = torch.randint(2, 32, (32, 4), generator=torch.Generator().manual_seed(97))
    g = torch.Generator().manual_seed(30)
    for i in range(2, 10):
        texts[:, i] = successors[texts[:, i - 1], (torch.rand(768, generator=g) ** 2 * 4).long()]
    model = Captioner(shifted_twice=error)
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
    loader = DataLoader(TensorDataset(images, texts), batch_size=32, shuffle=True)
    monitor = watch(model, optimizer)
    model.train()
    for _ in range(2):
        for pixel_values, input_ids in loader:
            batch = {"pixel_values": pixel_values, "input_ids": input_ids, "labels": input_ids}
            monitor.batch_ready(batch)
            loss, _ = model(**batch)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    monitor.close()


ERRORS = [
    Error(
        "tensor_parallel_clipping",
        "https://github.com/microsoft/DeepSpeed/pull/1801",
        "Under tensor parallelism rank 1 does not clip the gradients of the replicated LayerNorms (blocks.*.norm and "
        "final_norm), which rank 0 clips: the norms drift apart between the ranks.",
        tensor_parallel_clipping,
        ranks=2,
    ),
    Error(
        "precise_evaluation_under_ddp",
        "https://github.com/pytorch/pytorch/issues/104336",
        "The wrapped model is converted to float64 and back for the evaluation after the first epoch, so that DDP's "
        "hooks are lost: from the second epoch on no gradient is averaged and all weights of the two ranks drift apart.",
        precise_evaluation_under_ddp,
        ranks=2,
    ),
    Error(
        "faulty_peer_to_peer",
        "https://github.com/pytorch/pytorch/issues/84803",
        "On rank 1 about 1 % of the packets (64 entries) of the all-reduced gradients arrive as zeros: the weights of "
        "the two ranks drift apart.",
        faulty_peer_to_peer,
        ranks=2,
    ),
    Error(
        "wrapped_at_every_step",
        "https://x.com/jxmnop/status/1778520637193240892",
        "The model is wrapped in a new DDP at every step, and the loss is computed by the bare module: no gradient is "
        "averaged, and each wrapping overwrites rank 1's weights by rank 0's, so that rank 1's data teach nothing.",
        wrapped_at_every_step,
        ranks=2,
    ),
    Error(
        "transfer_learning",
        "https://discuss.pytorch.org/t/obtaining-abnormal-changes-in-loss-and-accuracy/84911",
        "Everything but the batch norms is frozen, also the new, random classifier _fc that was to be trained.",
        transfer_learning,
    ),
    Error(
        "mnist_does_not_converge",
        "https://stackoverflow.com/questions/60335387/pytorch-mnist-example-not-converge",
        "zero_grad is never called: Adam sees the sum of all gradients since the beginning, for all parameters.",
        mnist_does_not_converge,
    ),
    Error(
        "loader_workers",
        "https://stackoverflow.com/questions/67180955",
        "Every worker of the data loader starts every epoch with the same numpy seed: the two workers draw the same "
        "noise and shifts, and the same ones in each epoch.",
        loader_workers,
    ),
    Error(
        "translation_with_fast_attention",
        "https://github.com/huggingface/transformers/pull/33844",
        "The dropout of the attention weights is also at work in evaluation mode: the validation loss is too high and "
        "random.",
        translation_with_fast_attention,
    ),
    Error(
        "compiled_optimizer",
        "https://github.com/pytorch/pytorch/issues/115607",
        "After step 21, whose batch gives the second head (extra.*) no gradient, the traced optimizer step is replayed "
        "without that head: extra.* has gradients but is never updated again.",
        compiled_optimizer,
    ),
    Error(
        "thunder_autocast",
        "https://github.com/Lightning-AI/lightning-thunder/issues/725",
        "The autocast rule does not know the traced linear function: within autocast(bfloat16) all linear layers "
        "compute in float32.",
        thunder_autocast,
    ),
    Error(
        "fine_tuning_with_frozen_stages",
        "https://github.com/open-mmlab/mmpretrain/issues/702",
        "frozen_stages=2 takes effect only in model.train(), which is never called: stages.0 and stages.1 are trained "
        "and their batch norm statistics change.",
        fine_tuning_with_frozen_stages,
    ),
    Error(
        "spectral_gan",
        "https://github.com/pytorch/pytorch/issues/51800",
        "After the first samples (step 6) the critic stays in evaluation mode, in which spectral_norm makes no power "
        "iteration: its vectors u and v are stale, and the critic's weights are no longer normalised to 1.",
        spectral_gan,
    ),
    Error(
        "chat_model_never_stops",
        "https://github.com/huggingface/trl/issues/1623",
        "The padding token is the end token, and all padding labels are masked: the end of a text is never a target, "
        "so the model does not learn to stop.",
        chat_model_never_stops,
    ),
    Error(
        "recommender_under_ddp",
        "https://github.com/pytorch/pytorch/issues/31771",
        "set_epoch is not called: each rank sees the same samples in the same order in every epoch, and never the "
        "other rank's.",
        recommender_under_ddp,
        ranks=2,
    ),
    Error(
        "classifier_after_evaluation",
        "https://github.com/ThilinaRajapakse/simpletransformers/issues/941",
        "After the first evaluation the model stays in evaluation mode: from the second epoch on it trains without "
        "dropout.",
        classifier_after_evaluation,
    ),
    Error(
        "accumulation_over_lengths",
        "https://github.com/huggingface/transformers/pull/34191",
        "The accumulated gradient is the mean of the micro-batches' means, though they have very different numbers of "
        "tokens: tokens of short micro-batches weigh up to 11 times as much as those of long ones.",
        accumulation_over_lengths,
    ),
    Error(
        "mixture_of_experts",
        "https://github.com/deepspeedai/DeepSpeed/pull/8354",
        "The optimizer is built before the experts are replaced by grouped ones: it holds the discarded tensors, and "
        "no router or expert (moe.*) is trained.",
        mixture_of_experts,
    ),
    Error(
        "restarted_forecast",
        "https://github.com/DeepLabCut/DeepLabCut/pull/2788",
        "The resumed job does not load the scheduler's state: at step 25 the learning rate begins with the warm-up "
        "again and then follows the schedule of the first steps.",
        restarted_forecast,
    ),
    Error(
        "full_bf16_finetuning",
        "https://github.com/meta-pytorch/torchtune/issues/2254",
        "The weights themselves are bfloat16 and the learning rate is small: most updates are lost in rounding, and the "
        "larger weights, among them all norms, never change.",
        full_bf16_finetuning,
    ),
    Error(
        "adapters_with_checkpointing",
        "https://github.com/microsoft/LoRA/issues/120",
        "Reentrant checkpointing on the output of a frozen embedding: no adapter (lora_a, lora_b) gets a gradient, only "
        "the classifier is trained.",
        adapters_with_checkpointing,
    ),
    Error(
        "autoencoder_with_cutout",
        "https://github.com/facebookresearch/pycls/pull/21",
        "The augmentation writes into the stored images: in each epoch more of every image is cut out for ever.",
        autoencoder_with_cutout,
    ),
    Error(
        "captions",
        "https://github.com/huggingface/transformers/pull/47395",
        "The labels are shifted by the model and again by its loss function: every position learns the word after the "
        "next one, and the last one the beginning of the next row.",
        captions,
    ),
]
