"""24 tiny trainings, each with one silent error (author b)."""

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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


@dataclass(frozen=True)
class Error:
    name: str
    thread: str
    what: str
    run: Callable
    ranks: int = 1


# ---------------------------------------------------------------- data and models


def save(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def order(n, batch_size, seed, epoch):
    """The shuffled batches of indices of one epoch."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    return list(torch.randperm(n, generator=generator).split(batch_size))


def images(n=256, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    patterns = torch.randn(classes, 1, 12, 12, generator=torch.Generator().manual_seed(77))
    return 0.6 * patterns[y] + torch.randn(n, 1, 12, 12, generator=g), y


def table(n=320, width=16, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=g)
    w = torch.randn(width, classes, generator=torch.Generator().manual_seed(78))
    noise = torch.randn(n, classes, generator=g)
    return x, (x.tanh() @ w + 0.5 * noise).argmax(1)


def regression(n=320, width=10, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=g)
    w = torch.randn(width, generator=torch.Generator().manual_seed(79))
    return x, torch.sin(x @ w / 2) + x[:, 0] + 0.1 * torch.randn(n, generator=g)


def text(n=256, length=17, vocabulary=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    table_ = 2.5 * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(80))
    tokens = torch.zeros(n, length, dtype=torch.long)
    tokens[:, 0] = torch.randint(0, vocabulary, (n,), generator=g)
    for t in range(1, length):
        p = table_[tokens[:, t - 1]].softmax(-1)
        tokens[:, t] = torch.multinomial(p, 1, generator=g).squeeze(1)
    return tokens


class CNN(nn.Module):
    def __init__(self, classes=4, softmax=False):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(64, classes)
        self.softmax = softmax

    def forward(self, x):
        y = self.head(self.drop(self.features(x)))
        return y.softmax(1) if self.softmax else y


def mlp(inputs, outputs, width=32, dropout=0.0):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs),
    )


class Block(nn.Module):
    def __init__(self, width, heads=2, causal=True):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.heads, self.causal = heads, causal

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (a.view(b, t, self.heads, -1).transpose(1, 2) for a in self.qkv(self.n1(x)).split(c, 2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + self.ff(self.n2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=24, width=32, layers=2, causal=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, causal=causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Recurrent(nn.Module):
    def __init__(self, vocabulary=24, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.head(self.rnn(self.embedding(x))[0])


class VAE(nn.Module):
    def __init__(self, width=16, latent=4):
        super().__init__()
        self.encoder = mlp(width, 2 * latent)
        self.decoder = mlp(latent, width)

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar


def next_token_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


@torch.no_grad()
def mean_loss(model, x, y, loss_function=F.cross_entropy):
    model.eval()
    loss = loss_function(model(x), y).item()
    model.train()
    return loss


# ---------------------------------------------------------------- resumes


def resume_moments_rank(watch, error=False):
    rank, world = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(text(seed=1))
    saved = None
    for start, stop in ((0, 3), (3, 6)):
        torch.manual_seed(3)
        model = DDP(LanguageModel())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
        monitor = watch(model, optimizer)
        if saved:
            state = load(saved)
            model.module.load_state_dict(state["model"])
            if rank == 0 or not error:
                optimizer.load_state_dict(state["optimizer"])
            monitor.load_state_dict(state["monitor"])
            torch.set_rng_state(state["rng"])
        sampler = DistributedSampler(data, world, rank, shuffle=True, seed=5)
        loader = DataLoader(data, batch_size=16, sampler=sampler)
        for epoch in range(start, stop):
            sampler.set_epoch(epoch)
            for (tokens,) in loader:
                monitor.batch_ready(tokens)
                optimizer.zero_grad()
                loss = next_token_loss(model, tokens)
                loss.backward()
                monitor.check_before_step(loss)
                optimizer.step()
        saved = save({
            "model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "monitor": monitor.state_dict(),
        })
        monitor.close()


def resume_older_weights(watch, error=False):
    x, y = table(seed=2)
    vx, vy = table(128, seed=92)
    files = {}
    for start, stop in ((0, 27), (27, 54)):
        torch.manual_seed(11)
        model = mlp(16, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        monitor = watch(model, optimizer, schedulers=[scheduler])
        if files:
            names = [name for name in files if name.startswith("model_")]
            newest = sorted(names)[-1] if error else max(names, key=lambda name: int(name.split("_")[1]))
            model.load_state_dict(load(files[newest]))
            state = load(files["trainer"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            monitor.load_state_dict(state["monitor"])
            torch.set_rng_state(state["rng"])
        for step in range(start, stop):
            batch = order(len(x), 32, 2, step // 10)[step % 10]
            monitor.batch_ready((x[batch], y[batch]))
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
            if (step + 1) % 9 == 0:
                monitor.evaluated(mean_loss(model, vx, vy))
                files[f"model_{step + 1}"] = save(model.state_dict())
                files["trainer"] = save({
                    "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                    "monitor": monitor.state_dict(), "rng": torch.get_rng_state(),
                })
        monitor.close()


def resume_step_count(watch, error=False):
    tokens = text(seed=3)
    saved = None
    for start, stop in ((0, 28), (28, 52)):
        torch.manual_seed(12)
        model = Recurrent()
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        monitor = watch(model, optimizer)
        if saved:
            state = load(saved)
            model.load_state_dict(state["model"])
            if error:
                for p, (m, v) in zip(model.parameters(), state["moments"]):
                    optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": m, "exp_avg_sq": v}
            else:
                optimizer.load_state_dict(state["optimizer"])
            monitor.load_state_dict(state["monitor"])
            torch.set_rng_state(state["rng"])
        for step in range(start, stop):
            batch = tokens[order(len(tokens), 16, 3, step // 16)[step % 16]]
            monitor.batch_ready(batch)
            optimizer.zero_grad(set_to_none=True)
            loss = next_token_loss(model, batch)
            loss.backward()
            monitor.check_before_step(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        saved = save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "monitor": monitor.state_dict(),
            "moments": [(optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]) for p in model.parameters()],
        })
        monitor.close()


def resume_learning_rate(watch, error=False):
    x, y = images(seed=4)
    base = 0.05
    saved = None
    for start, stop in ((0, 4), (4, 7)):
        torch.manual_seed(13)
        model = CNN()
        optimizer = torch.optim.SGD(model.parameters(), lr=base, momentum=0.9, weight_decay=1e-4)
        monitor = watch(model, optimizer)
        if saved:
            state = load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            if error:
                for group in optimizer.param_groups:
                    group["lr"] = base
            monitor.load_state_dict(state["monitor"])
        for epoch in range(start, stop):
            if epoch == 2:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.1
            model.train()
            for batch in order(len(x), 32, 4, epoch):
                monitor.batch_ready(x[batch])
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                monitor.check_before_step(loss)
                optimizer.step()
        saved = save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
            "monitor": monitor.state_dict(),
        })
        monitor.close()


def warm_cosine(warm, total):
    def rate(step):
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / (total - warm))))

    return rate


def resume_scheduler_anew(watch, error=False):
    tokens = text(seed=5)
    saved = None
    for start, stop in ((0, 30), (30, 56)):
        torch.manual_seed(14)
        model = LanguageModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        if saved:
            state = load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_cosine(8, 60))
        if saved and not error:
            scheduler.load_state_dict(state["scheduler"])
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr()):
                group["lr"] = rate
        monitor = watch(model, optimizer, schedulers=[scheduler])
        if saved:
            monitor.load_state_dict(state["monitor"])
            torch.set_rng_state(state["rng"])
        for step in range(start, stop):
            batch = tokens[order(len(tokens), 16, 5, step // 16)[step % 16]]
            monitor.batch_ready(batch)
            loss = next_token_loss(model, batch)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        saved = save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(), "monitor": monitor.state_dict(),
        })
        monitor.close()


def resume_scheduler_ahead(watch, error=False):
    x, y = regression(seed=6)
    saved = None
    for start, stop in ((0, 25), (25, 50)):
        torch.manual_seed(15)
        model = mlp(10, 1)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=4e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
        monitor = watch(model, optimizer, schedulers=[scheduler])
        if saved:
            state = load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            if error:
                for _ in range(start):  # to the step of the checkpoint
                    scheduler.step()
            monitor.load_state_dict(state["monitor"])
            torch.set_rng_state(state["rng"])
        for step in range(start, stop):
            batch = order(len(x), 32, 6, step // 10)[step % 10]
            monitor.batch_ready({"x": x[batch], "y": y[batch]})
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[batch]).squeeze(1), y[batch])
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
        saved = save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(), "monitor": monitor.state_dict(),
        })
        monitor.close()


def resume_data_again(watch, error=False):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = table(512, seed=7)
    data = TensorDataset(x, y)
    epochs = 5
    saved = None
    for start in (0, 3):
        torch.manual_seed(16)
        model = DDP(mlp(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        monitor = watch(model, optimizer)
        if saved:
            state = load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            monitor.load_state_dict(state["monitor"])
            torch.set_rng_state(state["rng"])
        sampler = DistributedSampler(data, world, rank, shuffle=True, seed=9)
        loader = DataLoader(data, batch_size=32, sampler=sampler)
        for epoch in range(start, 3 if start == 0 else epochs):
            sampler.set_epoch(epoch - start if error else epoch)
            for bx, by in loader:
                monitor.batch_ready((bx, by))
                optimizer.zero_grad()
                loss = F.cross_entropy(model(bx), by)
                loss.backward()
                monitor.check_before_step(loss)
                optimizer.step()
        saved = save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "monitor": monitor.state_dict(),
        })
        monitor.close()


def resume_data_skipped(watch, error=False):
    x, _ = table(640, width=3, seed=8)
    x = torch.tanh(x @ torch.randn(3, 16, generator=torch.Generator().manual_seed(5)))
    accumulate, saved = 2, None
    stream = [b for epoch in range(8) for b in order(len(x), 16, 8, epoch)]
    for stop in (24, 48):
        torch.manual_seed(17)
        model = VAE()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        monitor = watch(model, optimizer)
        step, consumed = 0, 0
        if saved:
            state = load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            step, consumed = state["step"], state["consumed"]
            monitor.load_state_dict(state["monitor"])
        batches = iter(stream[consumed * accumulate if error else consumed:])
        while step < stop:
            optimizer.zero_grad()
            total = 0.0
            for _ in range(accumulate):
                batch = x[next(batches)]
                consumed += 1
                monitor.batch_ready(batch)
                out, mu, logvar = model(batch)
                kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
                loss = (F.mse_loss(out, batch, reduction="none").sum(1).mean() + 0.1 * kl) / accumulate
                loss.backward()
                total = total + loss.detach()
            monitor.check_before_step(total)
            optimizer.step()
            step += 1
        saved = save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
            "step": step, "consumed": consumed, "monitor": monitor.state_dict(),
        })
        monitor.close()


def resume_scaler(watch, error=False):
    x, y = images(seed=9)
    saved = None
    for start, stop in ((0, 28), (28, 52)):
        torch.manual_seed(18)
        model = CNN()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=6)
        monitor = watch(model, optimizer, scaler=scaler)
        if saved:
            state = load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if not error:
                scaler.load_state_dict(state["scaler"])
            torch.set_rng_state(state["rng"])
            monitor.load_state_dict(state["monitor"])
        for step in range(start, stop):
            batch = order(len(x), 32, 9, step // 8)[step % 8]
            monitor.batch_ready(x[batch])
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x[batch]).float(), y[batch])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            monitor.check_before_step(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        saved = save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
            "rng": torch.get_rng_state(), "monitor": monitor.state_dict(),
        })
        monitor.close()


def resume_random_state(watch, error=False):
    x, _ = regression(320, width=8, seed=10)
    x = torch.tanh(x @ torch.randn(8, 8, generator=torch.Generator().manual_seed(6)) / 2)
    saved = None
    for start, stop in ((0, 26), (26, 50)):
        torch.manual_seed(19)
        model = mlp(9, 8, width=48, dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        monitor = watch(model, optimizer)
        if saved:
            state = load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            monitor.load_state_dict(state["monitor"])
            if not error:
                torch.set_rng_state(state["rng"])
        for step in range(start, stop):
            clean = x[order(len(x), 32, 10, step // 10)[step % 10]]
            monitor.batch_ready(clean)
            t = torch.rand(len(clean), 1)
            noise = torch.randn_like(clean)
            noisy = (1 - t).sqrt() * clean + t.sqrt() * noise
            loss = F.mse_loss(model(torch.cat([noisy, t], 1)), noise)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        saved = save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": monitor.state_dict(),
            "rng": torch.get_rng_state(),
        })
        monitor.close()


def resume_half_of_optimizers(watch, error=False):
    real_data = regression(320, width=6, seed=11)[0] * 0.5 + 1.0
    saved = None
    for start, stop in ((0, 26), (26, 50)):
        torch.manual_seed(20)
        generator, critic = mlp(4, 6), mlp(6, 1)
        opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
        monitor_g, monitor_d = watch(generator, opt_g), watch(critic, opt_d)
        if saved:
            state = load(saved)
            generator.load_state_dict(state["generator"])
            critic.load_state_dict(state["critic"])
            opt_g.load_state_dict(state["opt_g"])
            if not error:
                opt_d.load_state_dict(state["opt_d"])
            torch.set_rng_state(state["rng"])
            monitor_g.load_state_dict(state["monitor_g"])
            monitor_d.load_state_dict(state["monitor_d"])
        for step in range(start, stop):
            real = real_data[order(len(real_data), 32, 11, step // 10)[step % 10]]
            z = torch.randn(len(real), 4)
            monitor_d.batch_ready(real)
            opt_d.zero_grad()
            fake = generator(z)
            loss_d = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
            loss_d.backward()
            monitor_d.check_before_step(loss_d)
            opt_d.step()
            monitor_g.batch_ready(z)
            opt_g.zero_grad()
            loss_g = F.softplus(-critic(fake)).mean()
            loss_g.backward()
            monitor_g.check_before_step(loss_g)
            opt_g.step()
        saved = save({
            "generator": generator.state_dict(), "critic": critic.state_dict(), "opt_g": opt_g.state_dict(),
            "opt_d": opt_d.state_dict(), "rng": torch.get_rng_state(), "monitor_g": monitor_g.state_dict(),
            "monitor_d": monitor_d.state_dict(),
        })
        monitor_g.close()
        monitor_d.close()


def resume_renamed_part(watch, error=False):
    tokens = text(seed=12)
    saved = None
    for start, stop in ((0, 30), (30, 54)):
        torch.manual_seed(21)
        model = Recurrent()
        optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
        monitor = watch(model, optimizer)
        if saved:
            state = load(saved)
            if error:
                # the module was called `lstm` when the file was written
                weights = {k.replace("rnn.", "lstm."): v for k, v in state["model"].items()}
                model.load_state_dict(weights, strict=False)
            else:
                model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            monitor.load_state_dict(state["monitor"])
            torch.set_rng_state(state["rng"])
        for step in range(start, stop):
            batch = tokens[order(len(tokens), 16, 12, step // 16)[step % 16]]
            monitor.batch_ready(batch)
            loss = next_token_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        saved = save({
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "monitor": monitor.state_dict(),
        })
        monitor.close()


# ---------------------------------------------------------------- other errors


def softmax_twice(watch, error=False):
    torch.manual_seed(31)
    x, y = images(seed=21)
    vx, vy = images(96, seed=121)
    model = CNN(softmax=error)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = watch(model, optimizer)
    for epoch in range(6):
        for batch in order(len(x), 32, 21, epoch):
            monitor.batch_ready((x[batch], y[batch]))
            optimizer.zero_grad()
            loss = criterion(model(x[batch]), y[batch])
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        monitor.evaluated(mean_loss(model, vx, vy, criterion))
    monitor.close()


def clipped_scaled(watch, error=False):
    torch.manual_seed(32)
    x, y = table(seed=22)
    model = mlp(16, 3, width=48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    monitor = watch(model, optimizer, scaler=scaler)
    for step in range(50):
        batch = order(len(x), 32, 22, step // 10)[step % 10]
        monitor.batch_ready(x[batch])
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[batch]).float(), y[batch])
        scaler.scale(loss).backward()
        if error:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.unscale_(optimizer)
            monitor.check_before_step(loss)
        else:
            scaler.unscale_(optimizer)
            monitor.check_before_step(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    monitor.close()


def head_replaced(watch, error=False):
    torch.manual_seed(33)
    x, y = images(classes=3, seed=23)
    model = CNN(classes=10)
    if not error:
        model.head = nn.Linear(64, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if error:
        model.head = nn.Linear(64, 3)
    monitor = watch(model, optimizer)
    for epoch in range(6):
        model.train()
        for batch in order(len(x), 32, 23, epoch):
            monitor.batch_ready(x[batch])
            model.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
    monitor.close()


def evaluation_mode(watch, error=False):
    torch.manual_seed(34)
    x, y = images(seed=24)
    vx, vy = images(96, seed=124)
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    monitor = watch(model, optimizer)
    if error:
        model.train()
    for epoch in range(6):
        if not error:
            model.train()
        for batch in order(len(x), 32, 24, epoch):
            monitor.batch_ready(x[batch])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            monitor.evaluated(F.cross_entropy(model(vx), vy).item())
    monitor.close()


def critic_gradients(watch, error=False):
    torch.manual_seed(35)
    data = regression(320, width=6, seed=25)[0] * 0.5 + 1.0
    generator, critic = mlp(4, 6), mlp(6, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    monitor_d, monitor_g = watch(critic, opt_d), watch(generator, opt_g)
    for step in range(50):
        real = data[order(len(data), 32, 25, step // 10)[step % 10]]
        fake = generator(torch.randn(len(real), 4))
        if not error:
            opt_d.zero_grad()
        monitor_d.batch_ready(real)
        loss_d = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss_d.backward()
        monitor_d.check_before_step(loss_d)
        opt_d.step()
        opt_d.zero_grad()
        monitor_g.batch_ready(real)
        opt_g.zero_grad()
        loss_g = F.softplus(-critic(fake)).mean()
        loss_g.backward()
        monitor_g.check_before_step(loss_g)
        opt_g.step()
    monitor_d.close()
    monitor_g.close()


def sees_the_future(watch, error=False):
    torch.manual_seed(36)
    tokens, held_out = text(seed=26), text(64, seed=126)
    model = LanguageModel(causal=not error)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_cosine(6, 60))
    monitor = watch(model, optimizer, schedulers=[scheduler])
    for step in range(58):
        batch = tokens[order(len(tokens), 16, 26, step // 16)[step % 16]]
        monitor.batch_ready(batch)
        loss = next_token_loss(model, batch)
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 16 == 15:
            with torch.no_grad():
                monitor.evaluated(next_token_loss(model, held_out).item())
    monitor.close()


class Residual(nn.Module):
    def __init__(self, listed, width=32):
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(3)]
        self.stem, self.head = nn.Linear(10, width), nn.Linear(width, 1)
        self.layers = layers if listed else nn.ModuleList(layers)

    def forward(self, x):
        h = self.stem(x)
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return self.head(h).squeeze(1)


def python_list(watch, error=False):
    torch.manual_seed(37)
    x, y = regression(seed=27)
    model = Residual(listed=error)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    monitor = watch(model, optimizer)
    for epoch in range(5):
        for batch in order(len(x), 32, 27, epoch):
            monitor.batch_ready({"x": x[batch], "y": y[batch]})
            optimizer.zero_grad()
            loss = F.huber_loss(model(x[batch]), y[batch])
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
    monitor.close()


class Quantised(nn.Module):
    def __init__(self, straight, codes=16, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Linear(32, latent), nn.LayerNorm(latent, elementwise_affine=False)
        )
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.GELU(), nn.Linear(32, 16))
        self.codes = nn.Embedding(codes, latent)
        self.straight = straight

    def forward(self, x):
        z = self.encoder(x)
        q = self.codes(torch.cdist(z.detach(), self.codes.weight.detach()).argmin(1))
        codebook = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        if self.straight:
            q = z + (q - z).detach()
        else:
            q = q.detach()
        return self.decoder(q), codebook


def codes_without_estimator(watch, error=False):
    torch.manual_seed(38)
    x = torch.tanh(table(width=3, seed=28)[0] @ torch.randn(3, 16, generator=torch.Generator().manual_seed(7)))
    model = Quantised(straight=not error)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = watch(model, optimizer)
    for step in range(50):
        batch = x[order(len(x), 32, 28, step // 10)[step % 10]]
        monitor.batch_ready(batch)
        optimizer.zero_grad()
        out, codebook = model(batch)
        loss = F.mse_loss(out, batch) + codebook
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
    monitor.close()


def inner_module(watch, error=False):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(39)
    x, y = table(512, seed=29)
    data = TensorDataset(x, y)
    model = DDP(mlp(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    monitor = watch(model, optimizer)
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            monitor.batch_ready((bx, by))
            optimizer.zero_grad()
            out = model.module(bx) if error else model(bx)
            loss = F.cross_entropy(out, by)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
    monitor.close()


def broadcast_target(watch, error=False):
    torch.manual_seed(40)
    x, y = regression(seed=30)
    vx, vy = regression(96, seed=130)
    model = mlp(10, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = watch(model, optimizer)

    def squared(out, target):
        out = out if error else out.squeeze(1)
        return ((out - target) ** 2).mean()

    for epoch in range(5):
        for batch in order(len(x), 32, 30, epoch):
            monitor.batch_ready((x[batch], y[batch]))
            optimizer.zero_grad()
            loss = squared(model(x[batch]), y[batch])
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
        monitor.evaluated(mean_loss(model, vx, vy, squared))
    monitor.close()


def epochs_and_steps(watch, error=False):
    torch.manual_seed(41)
    x, y = images(seed=31)
    epochs = 7
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    monitor = watch(model, optimizer, schedulers=[scheduler])
    for epoch in range(epochs):
        model.train()
        for batch in order(len(x), 32, 31, epoch):
            monitor.batch_ready(x[batch])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            if error:
                scheduler.step()
        if not error:
            scheduler.step()
    monitor.close()


def half_weights(watch, error=False):
    torch.manual_seed(42)
    tokens = text(seed=32)
    model = LanguageModel()
    if error:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    monitor = watch(model, optimizer)
    for step in range(50):
        batch = tokens[order(len(tokens), 16, 32, step // 16)[step % 16]]
        monitor.batch_ready(batch)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[:, :-1]).float()
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
    monitor.close()


ERRORS = [
    Error("resume_moments_rank", "EvolvingLMMs-Lab/OneVision-Encoder#65",
          "After the resume only rank 0 loads the optimizer's state: AdamW's moments of all parameters are empty on "
          "rank 1, and the weights of the two ranks drift apart.", resume_moments_rank, 2),
    Error("resume_older_weights", "own",
          "The newest file of weights is chosen by the order of the names (model_9 after model_27): all weights are "
          "those of step 9, the optimizer, the scheduler and the step those of step 27.", resume_older_weights),
    Error("resume_step_count", "own",
          "The resume restores both moments of Adam but its step count begins at 0 for all parameters, so the bias "
          "correction inflates them.", resume_step_count),
    Error("resume_learning_rate", "chainer/chainermn#225",
          "The resume sets the learning rate to that of the command line, 10 times the decayed rate of the "
          "checkpoint, for all parameters.", resume_learning_rate),
    Error("resume_scheduler_anew", "KaiyangZhou/deep-person-reid#270",
          "The scheduler's state is not loaded: warm-up and cosine begin anew at the resume, for all parameters.",
          resume_scheduler_anew),
    Error("resume_scheduler_ahead", "own",
          "The resume loads the scheduler's state and then steps it to the checkpoint's step once more: it is 25 steps "
          "ahead and the rate is too low, for all parameters.", resume_scheduler_ahead),
    Error("resume_data_again", "kyutai-labs/pocket-tts#287",
          "After the resume the samplers of both ranks get epoch 0 and 1 instead of 3 and 4: the same batches in the "
          "same order as at the beginning.", resume_data_again, 2),
    Error("resume_data_skipped", "own",
          "At the resume the micro-batches consumed are multiplied by the accumulation once more: the next 48 "
          "micro-batches of the data (1.2 epochs) are left out.", resume_data_skipped),
    Error("resume_scaler", "PolymathicAI/the_well#77",
          "The GradScaler's state is not restored: its scale and growth tracker begin at their initial values.",
          resume_scaler),
    Error("resume_random_state", "own",
          "The random state is not restored but seeded as at the start: noise, noise levels and dropout after the "
          "resume repeat those of the first steps.", resume_random_state),
    Error("resume_half_of_optimizers", "own",
          "Of the two optimizers of a GAN only the generator's is restored; the critic's moments and steps are lost.",
          resume_half_of_optimizers),
    Error("resume_renamed_part", "own",
          "With strict=False and keys of an older name the weights of the GRU are not restored; they are newly "
          "initialised, while the optimizer's state and all other weights are restored.", resume_renamed_part),
    Error("softmax_twice", "lansinuote/Huggingface_Toturials#6",
          "The model ends with a softmax and the loss is CrossEntropyLoss, which applies another: gradients of all "
          "parameters are weakened and the loss has a floor.", softmax_twice),
    Error("clipped_scaled", "milesial/Pytorch-UNet#468",
          "Gradients are clipped before the GradScaler unscales them: after unscaling the norm over all parameters is "
          "at most 1/4096.", clipped_scaled),
    Error("head_replaced", "own",
          "The head is replaced after the optimizer was made: the new head's weight and bias are never updated.",
          head_replaced),
    Error("evaluation_mode", "own",
          "After the first evaluation the model stays in eval mode: dropout is off and the BatchNorm statistics are "
          "frozen from epoch 2 on.", evaluation_mode),
    Error("critic_gradients", "own",
          "The critic's gradients are not cleared before its backward pass: those of the generator's loss, left from "
          "the step before, are added, for all parameters of the critic.", critic_gradients),
    Error("sees_the_future", "own",
          "The attention of the language model has no causal mask: each position sees its target.", sees_the_future),
    Error("python_list", "own",
          "Three layers are in a Python list instead of a ModuleList: they are not registered, and never trained.",
          python_list),
    Error("codes_without_estimator", "own",
          "The VQ autoencoder has no straight-through estimator: the encoder has no gradient of the reconstruction, "
          "only of the commitment.", codes_without_estimator),
    Error("inner_module", "own",
          "The forward pass calls ddp.module: the gradients are not reduced and both ranks train models of their own.",
          inner_module, 2),
    Error("broadcast_target", "own",
          "The output (B, 1) and target (B,) broadcast to (B, B) in the squared error: the model learns the mean.",
          broadcast_target),
    Error("epochs_and_steps", "own",
          "A cosine with T_max in epochs is stepped after each batch: the rate oscillates with a period of 14 steps.",
          epochs_and_steps),
    Error("half_weights", "own",
          "All weights are bf16 without master weights: updates below half a unit in the last place are rounded away; "
          "the weights of the LayerNorms never move, nor do most of the large weights of the embeddings.", half_weights),
]
