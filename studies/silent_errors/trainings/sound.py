"""Sound trainings: each one is right as it stands, though something in it may look odd."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


@dataclass(frozen=True)
class Error:
    name: str
    thread: str
    what: str
    run: Callable
    ranks: int = 1


# ---------------------------------------------------------------- data


def markov_tokens(count, vocabulary, generator, certainty=0.85):
    """A stream in which the next token follows from the last one, most of the time."""
    successor = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(7))
    noise = torch.rand(count, generator=generator) > certainty
    random = torch.randint(vocabulary, (count,), generator=generator)
    tokens = [int(random[0])]
    for n in range(1, count):
        tokens.append(int(random[n]) if noise[n] else int(successor[tokens[-1]]))
    return torch.tensor(tokens)


def blobs(count, classes=4, dimensions=16, seed=0, spread=1.0, centres_seed=99):
    g = torch.Generator().manual_seed(centres_seed)
    centres = torch.randn(classes, dimensions, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=g)
    x = centres[y] + spread * torch.randn(count, dimensions, generator=g)
    return x, y


def images(count, classes=4, seed=0, noise=0.5, patterns_seed=98, size=8):
    g = torch.Generator().manual_seed(patterns_seed)
    patterns = torch.randn(classes, 1, size, size, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=g)
    return patterns[y] + noise * torch.randn(count, 1, size, size, generator=g), y


def loader_of(tensors, batch_size, shuffle=True, seed=0, drop_last=True):
    g = torch.Generator().manual_seed(seed)
    return DataLoader(
        TensorDataset(*tensors), batch_size, shuffle=shuffle, generator=g, drop_last=drop_last
    )


@torch.no_grad()
def validate(model, loader):
    """Mean cross entropy, in eval mode; gives the model back in the mode it had."""
    was_training = model.training
    model.eval()
    total = count = 0
    for x, y in loader:
        total += F.cross_entropy(model(x).float(), y, reduction="sum").item()
        count += len(y)
    model.train(was_training)
    return total / count


# ---------------------------------------------------------------- 1 causal language model


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.0, hidden=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden * width), nn.GELU(), nn.Linear(hidden * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class PackedLM(nn.Module):
    def __init__(self, vocabulary=17, width=32, length=48, layers=1):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        nn.init.normal_(self.token.weight, std=0.2)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, input_ids, position_ids, document_ids):
        t = input_ids.shape[1]
        same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
        mask = same & torch.ones(t, t, dtype=torch.bool).tril()
        x = self.token(input_ids) + self.position(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def pack(count, length, generator):
    """Blocks of `length` tokens, each filled with documents; padding at the end of a block."""
    rows = []
    for _ in range(count):
        ids, positions, documents, labels = [], [], [], []
        document = 0
        while len(ids) < length - 6:
            n = int(torch.randint(8, 24, (1,), generator=generator))
            n = min(n, length - len(ids))
            tokens = (markov_tokens(n, 16, generator) + 1).tolist()
            ids += tokens
            positions += range(n)
            documents += [document] * n
            labels += [-100] + tokens[1:]  # nothing predicts the first token of a document
            document += 1
        rest = length - len(ids)
        ids += [0] * rest
        positions += [0] * rest
        documents += [-1] * rest
        labels += [-100] * rest
        rows.append(torch.tensor([ids, positions, documents, labels]))
    return torch.stack(rows)


def packed_causal_lm(watch, error=False):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    train, held_out = pack(256, 48, g), pack(32, 48, g)
    model = PackedLM()
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    steps, warm = 128, 10

    def shape(step):
        if step < warm:
            return step / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))

    scheduler = LambdaLR(optimizer, shape)
    monitor = watch(model, optimizer, schedulers=[scheduler])

    def loss_of(rows):
        ids, positions, documents, labels = rows.unbind(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids, positions, documents)
        return F.cross_entropy(
            logits[:, :-1].float().reshape(-1, 17), labels[:, 1:].reshape(-1), ignore_index=-100
        )

    model.train()
    for epoch in range(4):
        for (rows,) in loader_of([train], 8, seed=epoch):
            batch = dict(
                zip(("input_ids", "position_ids", "document_ids", "labels"), rows.unbind(1))
            )
            monitor.batch_ready(batch)
            loss = loss_of(rows)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            monitor.check_before_step(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            monitor.evaluated(loss_of(held_out).item())
        model.train()
    monitor.close()


# ---------------------------------------------------------------- 2 masked language model


class MaskedLM(nn.Module):
    """An encoder with a pooler, as BERT has it; the masked objective does not use the pooler."""

    def __init__(self, vocabulary=18, width=32, length=24):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 64, dropout=0.05, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, ids, pooled=False):
        x = self.encoder(self.token(ids) + self.position[: ids.shape[1]])
        if pooled:
            return self.pooler(x[:, 0])
        return self.decoder(self.transform(x))


def mask_tokens(ids, generator, rate=0.2):
    labels = ids.clone()
    chosen = torch.rand(ids.shape, generator=generator) < rate
    labels[~chosen] = -100
    dice = torch.rand(ids.shape, generator=generator)
    masked = ids.clone()
    masked[chosen & (dice < 0.8)] = 1
    swapped = chosen & (dice >= 0.9)
    masked[swapped] = torch.randint(2, 18, (int(swapped.sum()),), generator=generator)
    return masked, labels


def masked_lm_unused_pooler(watch, error=False):
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(2)
    text = markov_tokens(24 * 448, 16, g, certainty=0.97).view(-1, 24) + 2
    train, held_out = text[:384], text[384:]
    held_masked, held_labels = mask_tokens(held_out, g)  # one fixed masking
    model = MaskedLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    accumulate, steps = 2, 60
    scheduler = CosineAnnealingLR(optimizer, steps)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    model.train()
    loader = loader_of([train], 24, seed=3)
    iterator = iter(loader)
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(accumulate):
            try:
                (ids,) = next(iterator)
            except StopIteration:
                iterator = iter(loader)
                (ids,) = next(iterator)
            masked, labels = mask_tokens(ids, g)  # drawn anew each time
            monitor.batch_ready({"input_ids": masked, "labels": labels})
            logits = model(masked)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            (loss / accumulate).backward()
            monitor.micro_batch(loss)
            total += loss.item() / accumulate
        monitor.check_before_step()
        optimizer.step()
        scheduler.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                value = F.cross_entropy(
                    model(held_masked).flatten(0, 1), held_labels.flatten(), ignore_index=-100
                )
            monitor.evaluated(value.item())
            model.train()
    monitor.close()


# ---------------------------------------------------------------- 3 GAN


def wgan_gp_three_critic_steps(watch, error=False):
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(3)

    def real_batch(n=64):
        angle = 2 * math.pi * torch.randint(8, (n,), generator=g) / 8
        ring = torch.stack([angle.cos(), angle.sin()], 1)
        return 1.5 * ring + 2.0 + 0.05 * torch.randn(n, 2, generator=g)

    generator = nn.Sequential(
        nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2)
    )
    critic = nn.Sequential(
        nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)
    )
    averaged = copy.deepcopy(generator).requires_grad_(False)  # the one that is sampled from
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=3e-3, betas=(0.0, 0.9))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.0, 0.9))
    monitor_g = watch(generator, optimizer_g)
    monitor_c = watch(critic, optimizer_c)
    n_critic = 3
    for step in range(50):
        for _ in range(n_critic):
            real = real_batch()
            monitor_c.batch_ready(real)
            with torch.no_grad():
                fake = generator(torch.randn(len(real), 4))
            mix = torch.rand(len(real), 1)
            between = (mix * real + (1 - mix) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
            loss_c = critic(fake).mean() - critic(real).mean() + 10 * penalty
            optimizer_c.zero_grad()
            loss_c.backward()
            monitor_c.check_before_step(loss_c)
            optimizer_c.step()
        noise = torch.randn(64, 4)
        monitor_g.batch_ready(noise)
        loss_g = -critic(generator(noise)).mean()
        optimizer_g.zero_grad()
        loss_g.backward()  # also fills the critic's gradients, which its own zero_grad removes
        monitor_g.check_before_step(loss_g)
        optimizer_g.step()
        with torch.no_grad():
            for a, p in zip(averaged.parameters(), generator.parameters()):
                a.lerp_(p, 0.1)
    monitor_g.close()
    monitor_c.close()


# ---------------------------------------------------------------- 4 VAE


class VAE(nn.Module):
    def __init__(self, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def vae_kl_warmup_epoch_schedule(watch, error=False):
    torch.manual_seed(3)
    x, _ = images(640, classes=8, noise=0.3, seed=4)
    x = (x.flatten(1) > 0).float()
    train, held_out = x[:512], x[512:]
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.6)
    monitor = watch(model, optimizer, schedulers=[scheduler])

    def terms(x):
        logits, mean, log_variance = model(x)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum() / len(x)
        return reconstruction, kl

    step = 0
    for epoch in range(6):
        model.train()
        for (batch,) in loader_of([train], 64, seed=epoch):
            monitor.batch_ready(batch)
            beta = min(1.0, step / 24)  # from 0: KL annealing
            reconstruction, kl = terms(batch)
            loss = reconstruction + beta * kl
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            step += 1
        scheduler.step()  # once an epoch
        model.eval()
        with torch.no_grad():
            monitor.evaluated(sum(terms(held_out)).item())
    monitor.close()


# ---------------------------------------------------------------- 5 VQ-VAE


class Codebook(nn.Module):
    """van den Oord et al.: the codes are moving averages of what is assigned to them."""

    def __init__(self, codes=24, width=8, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        index = torch.cdist(flat, self.codes).argmin(1)
        quantised = self.codes[index].view_as(z)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(index, len(self.codes)).to(flat.dtype)
                self.size.lerp_(chosen.sum(0), 1 - self.decay)
                self.sums.lerp_(chosen.T @ flat, 1 - self.decay)
                total = self.size.sum()
                smoothed = (self.size + 1e-5) / (total + len(self.codes) * 1e-5) * total
                self.codes.copy_(self.sums / smoothed[:, None])
        commitment = F.mse_loss(z, quantised.detach())
        return z + (quantised - z).detach(), commitment


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)
        )
        self.codebook = Codebook()
        self.decoder = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
        )

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1)
        z, commitment = self.codebook(z)
        return self.decoder(z.permute(0, 3, 1, 2)), commitment


def vq_vae_ema_codebook(watch, error=False):
    torch.manual_seed(4)
    x, _ = images(512, classes=6, noise=0.2, seed=5)
    train, held_out = x[:448], x[448:]
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = watch(model, optimizer)
    for epoch in range(4):
        model.train()
        for (batch,) in loader_of([train], 32, seed=epoch):
            monitor.batch_ready(batch)
            output, commitment = model(batch)
            loss = F.mse_loss(output, batch) + 0.25 * commitment
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            monitor.evaluated(F.mse_loss(model(held_out)[0], held_out).item())
    monitor.close()


# ---------------------------------------------------------------- 6 graph


class GCN(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.first = nn.Linear(features, hidden, bias=False)
        self.second = nn.Linear(hidden, classes, bias=False)

    def forward(self, x, adjacency):
        x = F.dropout(x, 0.5, self.training)
        x = F.relu(adjacency @ self.first(x))
        x = F.dropout(x, 0.5, self.training)
        return adjacency @ self.second(x)


def gcn_full_batch_one_graph(watch, error=False):
    torch.manual_seed(5)
    nodes, classes = 120, 3
    y = torch.arange(nodes) % classes
    same = y[:, None] == y[None, :]
    edge = torch.rand(nodes, nodes) < torch.where(same, 0.15, 0.02)
    a = (edge.triu(1) | edge.triu(1).T).float() + torch.eye(nodes)
    root = a.sum(1).rsqrt()
    adjacency = root[:, None] * a * root[None, :]
    x = F.one_hot(y, classes).float() @ torch.randn(classes, 24) * 0.3 + torch.randn(nodes, 24)
    order = torch.randperm(nodes)
    train, validation = order[:30], order[30:60]
    model = GCN(24, 16, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    monitor = watch(model, optimizer)
    for epoch in range(60):
        model.train()
        monitor.batch_ready((x, adjacency, y))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, adjacency)[train], y[train])
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
        if epoch % 10 == 9:
            model.eval()
            with torch.no_grad():
                logits = model(x, adjacency)
            monitor.evaluated(F.cross_entropy(logits[validation], y[validation]).item())
    monitor.close()


# ---------------------------------------------------------------- 7 recurrent


class CharLSTM(nn.Module):
    def __init__(self, vocabulary=24, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, 48, batch_first=True)
        self.head = nn.Linear(48, vocabulary)

    def forward(self, ids, state=None):
        x, state = self.lstm(self.embedding(ids), state)
        return self.head(x), state


def char_lstm_truncated_bptt(watch, error=False):
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(6)
    streams, window = 8, 16
    text = markov_tokens(streams * (window * 26 + 1), 24, g).view(streams, -1)
    held_out = markov_tokens(streams * (window * 4 + 1), 24, g).view(streams, -1)
    model = CharLSTM()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    monitor = watch(model, optimizer)
    for _ in range(2):
        model.train()
        state = None  # a new pass over the text
        for start in range(0, text.shape[1] - 1, window):
            x = text[:, start : start + window]
            y = text[:, start + 1 : start + window + 1]
            monitor.batch_ready((x, y))
            if state is not None:
                state = tuple(s.detach() for s in state)
            logits, state = model(x, state)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits, _ = model(held_out[:, :-1])
            value = F.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten())
        monitor.evaluated(value.item())
    monitor.close()


# ---------------------------------------------------------------- 8 siamese


def siamese_contrastive(watch, error=False):
    torch.manual_seed(7)
    x, y = blobs(600, classes=6, dimensions=20, spread=0.8, seed=8)
    encoder = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 8))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    monitor = watch(encoder, optimizer)
    g = torch.Generator().manual_seed(9)

    def pairs(low, high, n):
        a = torch.randint(low, high, (n,), generator=g)
        b = torch.randint(low, high, (n,), generator=g)
        # half of the pairs are of the same class
        for k in range(0, n, 2):
            candidates = (y[low:high] == y[a[k]]).nonzero().flatten() + low
            b[k] = candidates[torch.randint(len(candidates), (1,), generator=g)]
        return x[a], x[b], (y[a] == y[b]).float()

    def contrastive(one, two, same, margin=1.0):
        distance = F.pairwise_distance(encoder(one), encoder(two))
        return (same * distance**2 + (1 - same) * F.relu(margin - distance) ** 2).mean()

    held_out = pairs(500, 600, 128)
    for step in range(60):
        encoder.train()
        batch = pairs(0, 500, 32)
        monitor.batch_ready(batch)
        loss = contrastive(*batch)
        optimizer.zero_grad()
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
        if step % 20 == 19:
            encoder.eval()
            with torch.no_grad():
                monitor.evaluated(contrastive(*held_out).item())
    monitor.close()


# ---------------------------------------------------------------- 9 BYOL


class BYOL(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.online = nn.Sequential(
            nn.Linear(width, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16)
        )
        self.predictor = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
        )
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def update_target(self, momentum=0.97):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.mul_(momentum).add_(o, alpha=1 - momentum)

    def forward(self, one, two):
        p1, p2 = self.predictor(self.online(one)), self.predictor(self.online(two))
        with torch.no_grad():
            t1, t2 = self.target(one), self.target(two)
        return (4 - 2 * F.cosine_similarity(p1, t2) - 2 * F.cosine_similarity(p2, t1)).mean()


def byol_momentum_target(watch, error=False):
    torch.manual_seed(8)
    x, _ = blobs(640, classes=6, dimensions=20, spread=0.6, seed=10)
    model = BYOL()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, 50)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    model.train()
    for epoch in range(5):
        for (batch,) in loader_of([x], 64, seed=epoch):
            monitor.batch_ready(batch)
            one = batch + 0.2 * torch.randn_like(batch)
            two = batch + 0.2 * torch.randn_like(batch)
            loss = model(one, two)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
            model.update_target()
    monitor.close()


# ---------------------------------------------------------------- 10 forward-forward


class FFLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return F.relu(self.linear(x / (x.norm(dim=1, keepdim=True) + 1e-4)))

    def local_loss(self, positive, negative, threshold=1.0):
        good = self(positive).pow(2).mean(1)
        bad = self(negative).pow(2).mean(1)
        return F.softplus(torch.cat([threshold - good, bad - threshold])).mean()


def forward_forward_layers(watch, error=False):
    torch.manual_seed(9)
    x, y = blobs(640, classes=4, dimensions=16, spread=0.7, seed=11)
    layers = [FFLayer(20, 64), FFLayer(64, 64)]
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.02) for layer in layers]
    monitors = [watch(layer, o) for layer, o in zip(layers, optimizers)]

    def with_label(x, y):
        return torch.cat([3 * F.one_hot(y, 4).float(), x], 1)

    for epoch in range(6):
        for bx, by in loader_of([x, y], 64, seed=epoch):
            wrong = (by + torch.randint(1, 4, by.shape)) % 4
            positive, negative = with_label(bx, by), with_label(bx, wrong)
            for layer, optimizer, monitor in zip(layers, optimizers, monitors):
                monitor.batch_ready((positive, negative))
                loss = layer.local_loss(positive, negative)
                optimizer.zero_grad()
                loss.backward()
                monitor.check_before_step(loss)
                optimizer.step()
                with torch.no_grad():  # no gradient goes back to the layer below
                    positive, negative = layer(positive), layer(negative)
    for monitor in monitors:
        monitor.close()


# ---------------------------------------------------------------- 11 asynchronous workers


def shared_model_async_workers(watch, error=False):
    torch.manual_seed(10)
    x, y = blobs(1024, seed=12)
    vx, vy = blobs(256, seed=13)
    validation = loader_of([vx, vy], 128, shuffle=False)
    shared = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
    shared.share_memory()
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.05, momentum=0.5)
    monitor = watch(shared, optimizer)
    workers = [copy.deepcopy(shared) for _ in range(2)]
    streams = [
        loader_of([x[k::2], y[k::2]], 32, seed=k) for k in range(2)
    ]  # a half of the data each
    for _ in range(2):
        for batches in zip(*streams):
            for local in workers:  # both pull before either pushes: gradients are one step old
                local.load_state_dict(shared.state_dict())
            for local, (bx, by) in zip(workers, batches):
                monitor.batch_ready((bx, by))
                loss = F.cross_entropy(local(bx), by)
                local.zero_grad()
                loss.backward()
                for s, p in zip(shared.parameters(), local.parameters()):
                    s.grad = p.grad.clone()
                monitor.check_before_step(loss)
                optimizer.step()
        monitor.evaluated(validate(shared, validation))
    monitor.close()


# ---------------------------------------------------------------- 12 SGD, cyclic rate, SWA


class ResidualCNN(nn.Module):
    def __init__(self, classes=4, width=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width))
        self.conv = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.head = nn.Linear(width * 4, classes)
        nn.init.zeros_(self.head.weight)  # the first output is uniform
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x + self.conv(x)
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


def sgd_cyclic_zero_head_swa(watch, error=False):
    from torch.optim.swa_utils import AveragedModel, update_bn

    torch.manual_seed(11)
    loader = loader_of(images(512, seed=14), 32, seed=1)
    validation = loader_of(images(128, seed=15), 64, shuffle=False)
    model = ResidualCNN()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    scheduler = CyclicLR(optimizer, base_lr=0.02, max_lr=0.15, step_size_up=8)
    averaged = AveragedModel(model)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    for epoch in range(4):
        model.train()
        for x, y in loader:
            monitor.batch_ready((x, y))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()  # once a batch
        if epoch >= 1:
            averaged.update_parameters(model)  # at the low end of each cycle
        monitor.evaluated(validate(model, validation))
    update_bn(loader, averaged)
    monitor.evaluated(validate(averaged, validation))
    monitor.close()


# ---------------------------------------------------------------- 13 LoRA


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(rank))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


def pretrain(model, data, steps=40, lr=3e-3):
    """The "published" weights with which a fine-tuning starts."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    x, y = data
    model.train()
    for _ in range(steps):
        pick = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()
    for p in model.parameters():
        p.grad = None


def lora_frozen_base(watch, error=False):
    torch.manual_seed(12)
    body = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    pretrain(body, blobs(512, seed=16))
    x, y = blobs(512, seed=17, centres_seed=55)  # another task
    vx, vy = blobs(128, seed=18, centres_seed=55)
    for p in body.parameters():
        p.requires_grad_(False)
    for n in (0, 2, 4):
        body[n] = LoRALinear(body[n])
    model = body
    # all of the model, the frozen part too: the optimizer leaves out what has no gradient
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    monitor = watch(model, optimizer, schedulers=[scheduler])
    validation = loader_of([vx, vy], 64, shuffle=False)
    for epoch in range(4):
        model.train()
        for bx, by in loader_of([x, y], 32, seed=epoch):
            monitor.batch_ready((bx, by))
            loss = F.cross_entropy(model(bx), by)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        monitor.evaluated(validate(model, validation))
    monitor.close()


# ---------------------------------------------------------------- 14 fake quantisation


class FakeQuantLinear(nn.Linear):
    """4 bits, one scale for each output; the gradient passes straight through the rounding."""

    def forward(self, x):
        scale = self.weight.detach().abs().amax(1, keepdim=True).clamp_min(1e-8) / 7
        quantised = (self.weight / scale).round().clamp(-8, 7) * scale
        weight = self.weight + (quantised - self.weight).detach()
        return F.linear(x, weight, self.bias)


def quantised_finetuning_in_eval_mode(watch, error=False):
    torch.manual_seed(13)

    def build(linear):
        return nn.Sequential(
            linear(16, 64), nn.ReLU(), nn.Dropout(0.1), linear(64, 64), nn.ReLU(), nn.Dropout(0.1),
            linear(64, 4),
        )

    data = blobs(768, seed=19, spread=1.2)
    full = build(nn.Linear)
    pretrain(full, data, steps=15)
    model = build(FakeQuantLinear)
    model.load_state_dict(full.state_dict())
    model.eval()  # from here to the end: the quantised model is tuned without dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, 48)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    validation = loader_of(blobs(256, seed=20, spread=1.2), 128, shuffle=False)
    for epoch in range(4):
        for x, y in loader_of(data, 64, seed=epoch):
            monitor.batch_ready((x, y))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
        monitor.evaluated(validate(model, validation))
    monitor.close()


# ---------------------------------------------------------------- 15 mixture of experts


class SwitchLayer(nn.Module):
    def __init__(self, width=16, experts=12, hidden=24):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
            for _ in range(experts)
        )

    def forward(self, x):
        probability = self.router(x).softmax(-1)
        gate, index = probability.max(-1)
        y = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            chosen = (index == n).nonzero().flatten()
            if len(chosen):  # an expert to which nothing is routed does not run
                y = y.index_add(0, chosen, gate[chosen, None] * expert(x[chosen]))
        share = F.one_hot(index, len(self.experts)).float().mean(0)
        balance = len(self.experts) * (share * probability.mean(0)).sum()
        return x + y, balance


class SwitchClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(16, 16)
        self.switch = SwitchLayer()
        self.outputs = nn.Linear(16, 8)

    def forward(self, x):
        x, balance = self.switch(torch.tanh(self.inputs(x)))
        return self.outputs(x), balance


def moe_top_one_cosine_restarts(watch, error=False):
    torch.manual_seed(14)
    x, y = blobs(832, classes=8, seed=21)
    vx, vy = blobs(128, classes=8, seed=22)
    model = SwitchClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.01)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=26, T_mult=1, eta_min=1e-4)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    for epoch in range(5):
        model.train()
        for bx, by in loader_of([x, y], 32, seed=epoch):
            monitor.batch_ready((bx, by))
            logits, balance = model(bx)
            loss = F.cross_entropy(logits, by) + 0.01 * balance
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            monitor.evaluated(F.cross_entropy(model(vx)[0], vy).item())
    monitor.close()


# ---------------------------------------------------------------- 16 vision transformer


class ViT(nn.Module):
    def __init__(self, classes=4, width=24, layers=2):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(Block(width, 2, dropout=0.05) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x)[:, 0])


def vit_checkpointed_muon_adamw(watch, error=False):
    torch.manual_seed(15)
    data = images(384, seed=23, noise=0.8)
    validation = loader_of(images(128, seed=24, noise=0.8), 64, shuffle=False)
    model = ViT()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01)
    adamw = torch.optim.AdamW(others, lr=3e-3, weight_decay=0.01)
    monitor = watch(model, muon)
    accumulate = 2
    model.train()
    for epoch in range(4):
        for n, (x, y) in enumerate(loader_of(data, 16, seed=epoch)):
            monitor.batch_ready((x, y))
            loss = F.cross_entropy(model(x), y)
            (loss / accumulate).backward()
            if (n + 1) % accumulate == 0:
                monitor.check_before_step(loss)
                muon.step()
                adamw.step()
                model.zero_grad()
        monitor.evaluated(validate(model, validation))
    monitor.close()


# ---------------------------------------------------------------- 17-19 several processes


def ddp_two_ranks_sampler(watch, error=False):
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    torch.manual_seed(16)
    train = TensorDataset(*images(512, seed=25))
    held_out = TensorDataset(*images(128, seed=26))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(64, 4),
    )
    torch.manual_seed(160 + dist.get_rank())  # dropout differs between the ranks
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = CosineAnnealingLR(optimizer, 48)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    sampler = DistributedSampler(train, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train, 16, sampler=sampler)
    val_sampler = DistributedSampler(held_out, shuffle=False)
    val_loader = DataLoader(held_out, 64, sampler=val_sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            monitor.batch_ready((x, y))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        totals = torch.zeros(2)
        with torch.no_grad():
            for x, y in val_loader:
                totals += torch.tensor(
                    [F.cross_entropy(model.module(x), y, reduction="sum").item(), len(y)]
                )
        dist.all_reduce(totals)
        monitor.evaluated((totals[0] / totals[1]).item())
    monitor.close()


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(24, 4), nn.Linear(24, 6), nn.Linear(24, 3)])

    def forward(self, x, task):
        return self.heads[task](self.body(x))


def ddp_three_ranks_find_unused(watch, error=False):
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    torch.manual_seed(17)
    rank = dist.get_rank()
    tasks = [TensorDataset(*blobs(432, classes=c, seed=27 + c, centres_seed=c)) for c in (4, 6)]
    # the third head belongs to a task that comes later: it is not trained here
    model = DistributedDataParallel(TwoTasks(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    scheduler = StepLR(optimizer, 1, gamma=0.7)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    samplers = [DistributedSampler(t, shuffle=True, seed=1) for t in tasks]
    loaders = [DataLoader(t, 18, sampler=s) for t, s in zip(tasks, samplers)]
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        model.train()
        for n, pair in enumerate(zip(*loaders)):
            for turn in range(2):
                task = (turn + rank) % 2  # ranks work at different tasks in one step
                x, y = pair[task]
                monitor.batch_ready((x, y))
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x, task), y)
                loss.backward()
                monitor.check_before_step(loss)
                optimizer.step()
        scheduler.step()
    monitor.close()


def fsdp2_two_ranks(watch, error=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(18)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    g = torch.Generator().manual_seed(28)
    text = markov_tokens(17 * 384, 24, g).view(-1, 17)

    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(24, 32)
            self.position = nn.Parameter(0.02 * torch.randn(16, 32))
            self.blocks = nn.ModuleList(Block(32, 2) for _ in range(2))
            self.head = nn.Linear(32, 24)
            self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())

        def forward(self, ids):
            x = self.token(ids) + self.position
            for block in self.blocks:
                x = block(x, self.mask)
            return self.head(x)

    model = LM()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    monitor = watch(model, optimizer)
    rank, world = dist.get_rank(), dist.get_world_size()
    model.train()
    for epoch in range(3):
        order = torch.randperm(len(text), generator=torch.Generator().manual_seed(epoch))
        mine = text[order[rank::world]]
        for rows in mine.split(16):
            x, y = rows[:, :-1], rows[:, 1:]
            monitor.batch_ready((x, y))
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
    monitor.close()


# ---------------------------------------------------------------- 20 overfit one batch


def compiled_overfit_one_batch(watch, error=False):
    torch.manual_seed(19)
    x, y = images(16, seed=29, noise=1.0)  # the one batch
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(),
        nn.Linear(32, 4),
    )
    model = torch.compile(network, backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    model.train()
    for _ in range(50):
        monitor.batch_ready((x, y))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
    assert loss.item() < 0.05, "cannot even learn one batch by heart"
    monitor.close()


# ---------------------------------------------------------------- 21 GRPO


class Policy(nn.Module):
    def __init__(self, vocabulary=12, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary + 1, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.gru(self.embedding(ids))[0])


def grpo_three_inner_updates(watch, error=False):
    torch.manual_seed(20)
    policy = Policy()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=8e-3, weight_decay=0.0)
    monitor = watch(policy, optimizer)
    prompts, group, length, inner = 10, 8, 5, 3

    def log_probabilities(model, ids):
        logits = model(ids[:, :-1])[:, 1:]  # the prompt is two tokens: the start and a digit
        return logits.log_softmax(-1).gather(-1, ids[:, 2:, None]).squeeze(-1)

    for _ in range(44):
        digit = torch.randint(12, (prompts,)).repeat_interleave(group)
        ids = torch.stack([torch.full_like(digit, 12), digit], 1)
        with torch.no_grad():
            for _ in range(length):
                next_token = torch.distributions.Categorical(logits=policy(ids)[:, -1]).sample()
                ids = torch.cat([ids, next_token[:, None]], 1)
            reward = (ids[:, 2:] == (digit[:, None] + 1) % 12).float().mean(1)
            reward = reward + 0.2 * (ids[:, 2:] % 2 == 0).float().mean(1)
            grouped = reward.view(prompts, group)
            advantage = grouped - grouped.mean(1, keepdim=True)
            advantage = (advantage / (grouped.std(1, keepdim=True) + 1e-4)).view(-1, 1)
            old = log_probabilities(policy, ids)
            base = log_probabilities(reference, ids)
        for _ in range(inner):  # the same samples: the ratio corrects for the policy's change
            monitor.batch_ready({"input_ids": ids, "advantages": advantage})
            new = log_probabilities(policy, ids)
            ratio = (new - old).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            kl = (base - new).exp() - (base - new) - 1
            loss = (-surrogate + 0.01 * kl).mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    monitor.close()


# ---------------------------------------------------------------- 22 progressive unfreezing


def progressive_unfreezing(watch, error=False):
    torch.manual_seed(21)
    body = nn.Sequential(
        nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4)
    )
    pretrain(body, blobs(512, seed=30))
    x, y = blobs(384, classes=6, seed=31, centres_seed=44)
    validation = loader_of(blobs(128, classes=6, seed=32, centres_seed=44), 64, shuffle=False)
    model = body
    model[4] = nn.Linear(48, 6)
    model.requires_grad_(False)
    model[4].requires_grad_(True)
    optimizer = torch.optim.Adam(model[4].parameters(), lr=1e-2)
    monitor = watch(model, optimizer)
    plan = {2: (model[2], 5e-3), 4: (model[0], 2.5e-3)}  # epoch: what joins, at which rate
    for epoch in range(6):
        if epoch in plan:
            part, rate = plan[epoch]
            part.requires_grad_(True)
            optimizer.add_param_group({"params": list(part.parameters()), "lr": rate})
        model.train()
        for bx, by in loader_of([x, y], 48, seed=epoch):
            monitor.batch_ready((bx, by))
            loss = F.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        monitor.evaluated(validate(model, validation))
    monitor.close()


# ---------------------------------------------------------------- 23 frozen batch norm


class SmallCNN(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(10, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, classes))

    def forward(self, x):
        return self.head(self.body(x))


def finetune_frozen_batch_norm(watch, error=False):
    torch.manual_seed(22)
    model = SmallCNN()
    pretrain(model, images(512, seed=33))
    model.head[2] = nn.Linear(64, 6)
    data = images(384, classes=6, seed=34, patterns_seed=43)
    validation = loader_of(images(128, classes=6, seed=35, patterns_seed=43), 64, shuffle=False)

    def train_mode():
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()  # keeps the statistics of the pre-training
                module.requires_grad_(False)

    train_mode()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.head.parameters(), "lr": 1e-2},
            {"params": [p for p in model.body.parameters() if p.requires_grad], "lr": 2e-3},
        ],
        weight_decay=0.01,
    )
    scheduler = LambdaLR(
        optimizer,
        [
            lambda step: 1.0,
            lambda step: 0.0 if step < 10 else min(1.0, (step - 9) / 15),  # the body joins later
        ],
    )
    monitor = watch(model, optimizer, schedulers=[scheduler])
    for epoch in range(4):
        train_mode()
        for x, y in loader_of(data, 32, seed=epoch):
            monitor.batch_ready((x, y))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
        monitor.evaluated(validate(model, validation))
    monitor.close()


# ---------------------------------------------------------------- 24 plateau, MC dropout


def plateau_mc_dropout_evaluation(watch, error=False):
    torch.manual_seed(23)
    g = torch.Generator().manual_seed(36)
    x = 4 * torch.rand(640, 1, generator=g) - 2
    y = torch.sin(2 * x) + 0.1 * torch.randn(640, 1, generator=g)
    model = nn.Sequential(
        nn.Linear(1, 48), nn.ReLU(), nn.Dropout(0.05), nn.Linear(48, 48), nn.ReLU(),
        nn.Dropout(0.05), nn.Linear(48, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.05)
    monitor = watch(model, optimizer, schedulers=[scheduler])

    @torch.no_grad()
    def mc_dropout_mean(inputs, samples=12):
        model.train()  # on purpose: dropout stays on, its samples are averaged
        return torch.stack([model(inputs) for _ in range(samples)]).mean(0)

    for epoch in range(7):
        model.train()
        for bx, by in loader_of([x[:512], y[:512]], 64, seed=epoch):
            monitor.batch_ready((bx, by))
            loss = F.mse_loss(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        value = F.mse_loss(mc_dropout_mean(x[512:]), y[512:]).item()
        monitor.evaluated(value)
        scheduler.step(value)
    monitor.close()


# ---------------------------------------------------------------- 25 sparse embeddings


class Recommender(nn.Module):
    def __init__(self, users=800, items=1200, width=8):
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=True)
        self.item = nn.Embedding(items, width, sparse=True)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, user, item):
        u, i = self.user(user), self.item(item)
        return (u * i).sum(-1) + self.mlp(torch.cat([u, i], -1)).squeeze(-1)


def recommender_sparse_adam(watch, error=False):
    torch.manual_seed(24)
    g = torch.Generator().manual_seed(37)
    taste, kind = torch.randn(800, 2, generator=g), torch.randn(1200, 2, generator=g)
    # few users and items make most of the events
    user = (800 * torch.rand(8320, generator=g) ** 4).long()
    item = (1200 * torch.rand(8320, generator=g) ** 4).long()
    liked = ((taste[user] * kind[item]).sum(1) + kind[item, 0] + 0.5 > 0).float()
    model = Recommender()
    sparse = torch.optim.SparseAdam([model.user.weight, model.item.weight], lr=0.02)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=5e-3)
    monitor = watch(model, sparse)
    model.train()
    train = [user[:7680], item[:7680], liked[:7680]]
    for epoch in range(2):
        for batch in loader_of(train, 128, seed=epoch):
            monitor.batch_ready(tuple(batch))
            u, i, label = batch
            loss = F.binary_cross_entropy_with_logits(model(u, i), label)
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            sparse.step()
            dense.step()
        model.eval()
        with torch.no_grad():
            value = F.binary_cross_entropy_with_logits(model(user[7680:], item[7680:]), liked[7680:])
        monitor.evaluated(value.item())
        model.train()
    monitor.close()


# ---------------------------------------------------------------- 26 LBFGS


def pinn_lbfgs(watch, error=False):
    torch.manual_seed(25)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.linspace(0, math.pi, 48)[:, None].requires_grad_()
    ends = torch.tensor([[0.0], [math.pi]])
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=1.0, max_iter=3, history_size=20, line_search_fn="strong_wolfe"
    )
    monitor = watch(model, optimizer)

    def residual_loss():  # u'' = -sin x, u(0) = u(pi) = 0
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        return (ddu + torch.sin(x)).pow(2).mean() + model(ends).pow(2).mean()

    def closure():
        optimizer.zero_grad()
        loss = residual_loss()
        loss.backward(inputs=list(model.parameters()))
        monitor.check_before_step(loss)
        return loss

    for _ in range(20):
        monitor.batch_ready((x, ends))
        optimizer.step(closure)
    with torch.no_grad():
        monitor.evaluated((model(x) - torch.sin(x)).pow(2).mean().item())
    monitor.close()


# ---------------------------------------------------------------- 27 resume


def resume_from_checkpoint(watch, error=False):
    data = blobs(480, seed=38, spread=2.0)
    validation = loader_of(blobs(128, seed=39, spread=2.0), 64, shuffle=False)

    def build():
        model = nn.Sequential(
            nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        scheduler = CosineAnnealingLR(optimizer, 60)
        return model, optimizer, scheduler, watch(model, optimizer, schedulers=[scheduler])

    def epochs(which, model, optimizer, scheduler, monitor):
        for epoch in which:
            model.train()
            for x, y in loader_of(data, 32, seed=epoch):  # the order follows from the epoch
                monitor.batch_ready((x, y))
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                monitor.check_before_step(loss)
                optimizer.step()
                scheduler.step()
            monitor.evaluated(validate(model, validation))

    torch.manual_seed(26)
    model, optimizer, scheduler, monitor = build()
    epochs(range(2), model, optimizer, scheduler, monitor)
    file = io.BytesIO()
    torch.save(
        {
            "epoch": 2,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "monitor": monitor.state_dict(),
            "rng": torch.get_rng_state(),
        },
        file,
    )
    monitor.close()

    torch.manual_seed(12345)  # the restarted process begins elsewhere
    model, optimizer, scheduler, monitor = build()
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    monitor.load_state_dict(saved["monitor"])
    torch.set_rng_state(saved["rng"])
    epochs(range(saved["epoch"], 4), model, optimizer, scheduler, monitor)
    monitor.close()


# ---------------------------------------------------------------- 28 bf16 weights


def bf16_weights_two_unshuffled_epochs(watch, error=False):
    torch.manual_seed(27)
    x, y = blobs(600, seed=40)  # drawn independently: any order is a random order
    vx, vy = blobs(128, seed=41)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64, elementwise_affine=False),
        nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4),
    ).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    monitor = watch(model, optimizer)
    loader = DataLoader(TensorDataset(x.bfloat16(), y), batch_size=20, shuffle=False)
    validation = DataLoader(TensorDataset(vx.bfloat16(), vy), batch_size=128)
    for _ in range(2):
        model.train()
        for bx, by in loader:
            monitor.batch_ready((bx, by))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(bx).float(), by)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        monitor.evaluated(validate(model, validation))
    monitor.close()


TRAININGS = [
    Error(
        "packed_causal_lm",
        "own",
        "causal LM on packed documents under bf16 autocast, tied embeddings, position ids reset and labels ignored at "
        "each document's start, padding at the block's end, and a warm-up whose first step has the rate 0; 128 steps",
        packed_causal_lm,
    ),
    Error(
        "masked_lm_unused_pooler",
        "own",
        "masked LM whose pooler is in the model and in AdamW but never runs in this objective; two micro-batches a step, "
        "masked anew each time, zero_grad before them",
        masked_lm_unused_pooler,
    ),
    Error(
        "wgan_gp_three_critic_steps",
        "own",
        "WGAN-GP with two optimizers and a monitor for each, three critic steps for each generator step, a double "
        "backward, a last critic bias that cancels in the loss, leftover critic gradients from the generator's backward, and an EMA of the generator",
        wgan_gp_three_critic_steps,
    ),
    Error(
        "vae_kl_warmup_epoch_schedule",
        "own",
        "VAE whose KL weight starts at 0 (so its loss may rise while it anneals) and whose StepLR is stepped once an epoch",
        vae_kl_warmup_epoch_schedule,
    ),
    Error(
        "vq_vae_ema_codebook",
        "own",
        "VQ-VAE with codes as buffers that move by EMA in the forward pass (no gradient), some of them unused",
        vq_vae_ema_codebook,
    ),
    Error(
        "gcn_full_batch_one_graph",
        "own",
        "GCN on one graph, the same whole graph in every step, loss on the few labelled nodes",
        gcn_full_batch_one_graph,
    ),
    Error(
        "char_lstm_truncated_bptt",
        "own",
        "character LSTM with truncated BPTT: text in its order without shuffling, detached state carried over, two passes",
        char_lstm_truncated_bptt,
    ),
    Error(
        "siamese_contrastive",
        "own",
        "siamese encoder run twice a step with a margin loss that is 0 for many pairs; the last bias "
        "cancels in the distance, so its gradient is 0; no schedule",
        siamese_contrastive,
    ),
    Error(
        "byol_momentum_target",
        "own",
        "BYOL: the target network is part of the model, has no gradients, is not in the optimizer and moves by EMA after "
        "the step",
        byol_momentum_target,
    ),
    Error(
        "forward_forward_layers",
        "own",
        "forward-forward: each layer has its own loss, optimizer and monitor, and no gradient reaches the layer below",
        forward_forward_layers,
    ),
    Error(
        "shared_model_async_workers",
        "own",
        "asynchronous (A3C-like) workers in one process: gradients of local copies, one step old, are put on the shared "
        "model, which itself never runs in training",
        shared_model_async_workers,
    ),
    Error(
        "sgd_cyclic_zero_head_swa",
        "own",
        "CNN with a zero-initialised head (no gradient below it in the first step), SGD with weight decay, CyclicLR stepped "
        "per batch, SWA by torch.optim.swa_utils with update_bn",
        sgd_cyclic_zero_head_swa,
    ),
    Error(
        "lora_frozen_base",
        "own",
        "LoRA by hand: B=0 (A has a zero gradient in the first step), the frozen base is passed to AdamW with the rest, "
        "zero_grad at the end of the loop",
        lora_frozen_base,
    ),
    Error(
        "quantised_finetuning_in_eval_mode",
        "own",
        "quantisation-aware fine-tuning with 4-bit fake-quantised weights and a straight-through gradient, in eval mode "
        "(without dropout) from beginning to end on purpose",
        quantised_finetuning_in_eval_mode,
    ),
    Error(
        "moe_top_one_cosine_restarts",
        "own",
        "mixture of 12 experts with top-1 routing, so some experts get no token and no gradient in a step; cosine restarts "
        "stepped per batch, 130 steps",
        moe_top_one_cosine_restarts,
    ),
    Error(
        "vit_checkpointed_muon_adamw",
        "own",
        "ViT with gradient checkpointing (and dropout), two accumulated micro-batches with zero_grad after the step, Muon for "
        "the matrices and AdamW for the rest, of which only Muon is given to the monitor",
        vit_checkpointed_muon_adamw,
    ),
    Error(
        "ddp_two_ranks_sampler",
        "own",
        "CNN under DDP with DistributedSampler and set_epoch, dropout seeds that differ by rank, validation of the module "
        "itself, reduced over ranks",
        ddp_two_ranks_sampler,
        ranks=2,
    ),
    Error(
        "ddp_three_ranks_find_unused",
        "own",
        "multi-task model under DDP with find_unused_parameters: ranks work at different tasks in one step, and a head for a "
        "later task is never used",
        ddp_three_ranks_find_unused,
        ranks=3,
    ),
    Error(
        "fsdp2_two_ranks",
        "own",
        "small LM with fully_shard on its blocks and itself, each rank with its own half of each epoch's order",
        fsdp2_two_ranks,
        ranks=2,
    ),
    Error(
        "compiled_overfit_one_batch",
        "own",
        "sanity check: a CNN compiled by torch.compile(backend='eager') learns one batch of 16 by heart, to a loss near 0",
        compiled_overfit_one_batch,
    ),
    Error(
        "grpo_three_inner_updates",
        "own",
        "GRPO-like: three updates on each batch of samples with clipped ratios; the loss is about 0 at each first one and "
        "does not fall, the reward rises; 132 steps",
        grpo_three_inner_updates,
    ),
    Error(
        "progressive_unfreezing",
        "own",
        "fine-tuning with gradual unfreezing: only the head at first, deeper layers join by add_param_group at lower rates",
        progressive_unfreezing,
    ),
    Error(
        "finetune_frozen_batch_norm",
        "own",
        "fine-tuning in train mode with batch norm in eval mode and frozen, and a body whose group has the rate 0 for ten "
        "steps and then warms up",
        finetune_frozen_batch_norm,
    ),
    Error(
        "plateau_mc_dropout_evaluation",
        "own",
        "regression with ReduceLROnPlateau stepped by the validation, which averages dropout samples (MC dropout) and "
        "therefore is in train mode on purpose",
        plateau_mc_dropout_evaluation,
    ),
    Error(
        "recommender_sparse_adam",
        "own",
        "recommender with sparse embeddings (most rows untouched in a step, rare ones never) in SparseAdam and an MLP in "
        "Adam; the monitor has the first; 120 steps",
        recommender_sparse_adam,
    ),
    Error(
        "pinn_lbfgs",
        "own",
        "physics-informed network with LBFGS: the same points always, the closure runs several times a step",
        pinn_lbfgs,
    ),
    Error(
        "resume_from_checkpoint",
        "own",
        "training that is saved after two epochs and resumed rightly: model, optimizer, scheduler, epoch, random state and "
        "monitor",
        resume_from_checkpoint,
    ),
    Error(
        "bf16_weights_two_unshuffled_epochs",
        "own",
        "weights in pure bf16 with AdamW at 1e-3, where some small updates round away, and two epochs over a small data set "
        "in the same order (its rows are independent)",
        bf16_weights_two_unshuffled_epochs,
    ),
]
