"""What the monitor measures is what a plain computation gives."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from rmetric.monitor import Monitor
from rmetric.monitor.forward import ForwardProbes, _largest_logit
from rmetric.monitor.gradients import (
    WeightSample,
    gradients_of,
    layer_names,
    norms_by_layer,
    tensor_norm,
    tensor_norms,
)
from rmetric.monitor.workers import MicroBatchWorkers, cosines_to_mean
from tests.monitor.training import (
    backward_passes,
    batches,
    flat_gradient,
    flat_weights,
    make_model,
    squared_error,
)

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def test_norms_of_half_precision_do_not_overflow():
    tensor = torch.full((100,), 60000.0, dtype=torch.float16)
    assert tensor_norms([tensor]).item() == pytest.approx(600000.0)
    assert tensor_norm(tensor).item() == pytest.approx(600000.0)


def test_sparse_and_complex_gradients_have_their_norm():
    embedding = nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    (wave * (3 + 4j)).abs().sum().backward()
    parameters = [embedding.weight, wave]
    expected = [p.grad.to_dense().abs().pow(2).sum().sqrt().item() for p in parameters]
    assert tensor_norms(gradients_of(parameters)).tolist() == pytest.approx(expected)


def test_layers_add_up_to_the_whole():
    model = make_model()
    next(backward_passes(model, 1, seed=0))
    names = layer_names(name for name, _ in model.named_parameters())
    norms = tensor_norms(gradients_of(model.parameters())).tolist()
    by_layer = norms_by_layer(names, norms)
    assert list(by_layer) == ["0", "3", "4"]
    whole = math.sqrt(sum(norm * norm for norm in by_layer.values()))
    assert whole == pytest.approx(flat_gradient(model).norm().item())


@pytest.mark.parametrize(
    ("model", "size", "exact", "error"),
    [
        (make_model(), 10**6, True, 1e-6),
        (nn.Sequential(*(nn.Linear(200, 200) for _ in range(4))), 8000, False, 0.05),
    ],
)
def test_the_update_norm_is_exact_in_a_small_model_and_estimated_from_a_sample_in_a_larger(
    model, size, exact, error
):
    sample = WeightSample(model.parameters(), size)
    before = flat_weights(model)
    sample.remember()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for p in model.parameters():
            p += 0.01 * torch.randn(p.shape, generator=generator)
    after = flat_weights(model)
    assert sample.exact == exact
    expected = [float((after - before).norm()), float(after.norm())]
    assert [float(norm) for norm in sample.moved()] == pytest.approx(expected, rel=error)


def test_micro_batches_are_what_each_would_have_been_alone():
    model = make_model().eval()
    [micros] = batches(1, micro=4)
    rows = []
    for batch in micros:
        model.zero_grad()
        squared_error(model, batch).backward()
        rows.append(flat_gradient(model))
    model.zero_grad()
    alone = torch.stack(rows)
    workers = MicroBatchWorkers(model.parameters())
    workers.start()
    for batch in micros:
        (squared_error(model, batch) / 4).backward()
        workers.next()
    measured = workers.stop()
    assert measured.norms.tolist() == pytest.approx(alone.norm(dim=1).tolist(), rel=1e-5)
    assert measured.cosines.tolist() == pytest.approx(cosines_to_mean(alone).tolist(), rel=1e-4)
    assert measured.non_finite.tolist() == [0, 0, 0, 0]
    assert not workers.active


@pytest.mark.parametrize("together", [0, 40, 10**9])
def test_gradients_that_are_measured_together_are_measured_alike(monkeypatch, together):
    monkeypatch.setattr("rmetric.monitor.workers.TOGETHER", together)
    model = make_model().double().eval()
    model[0].float()  # of another type than the rest
    workers = MicroBatchWorkers(model.parameters(), size=20)
    workers.start()
    for seed in range(2):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            (parameter * torch.randn_like(parameter)).sum().backward()
        workers.next()
        rows = [p.grad for p in model.parameters()]
    measured = workers.stop()
    torch.manual_seed(0)
    first = [torch.randn_like(p) for p in model.parameters()]
    second = [row - before for row, before in zip(rows, first, strict=True)]
    for place, own in enumerate((first, second)):
        norm = 2 * sum(float(gradient.double().square().sum()) for gradient in own) ** 0.5
        assert float(measured.norms[place]) == pytest.approx(norm, rel=1e-6)
    assert workers._kept == {}


def test_micro_batches_that_use_other_parameters_are_told_apart():
    first, second = (nn.Linear(3, 3, bias=False) for _ in range(2))
    workers = MicroBatchWorkers([*first.parameters(), *second.parameters()])
    workers.start()
    for expert in (first, second):
        expert(torch.ones(1, 3)).sum().backward()
        workers.next()
    assert workers.stop().cosines.tolist() == pytest.approx([0.5**0.5] * 2)


def test_the_sample_of_gradients_is_of_those_that_train():
    frozen, trained = nn.Linear(100, 100).requires_grad_(False), nn.Linear(10, 10, bias=False)
    workers = MicroBatchWorkers([*frozen.parameters(), *trained.parameters()], size=100)
    workers.start()
    for rows in (torch.eye(10), -torch.eye(10)):  # their gradients differ beyond the first entry
        rows[0] = 1.0
        trained(rows).sum().backward()
        workers.next()
    assert min(workers.stop().cosines.tolist()) < 0.99


def test_a_failure_in_a_hook_ends_no_backward_pass(monkeypatch):
    def fail(_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("rmetric.monitor.workers.tensor_norms", fail)
    model = nn.Linear(2, 1)
    workers = MicroBatchWorkers(model.parameters())
    workers.start()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    workers.next()
    with pytest.raises(torch.OutOfMemoryError):
        workers.stop()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_parts_that_are_not_finite_are_counted_for_the_worker_that_has_them(value):
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    workers = MicroBatchWorkers(layers.parameters())
    workers.start()
    for bad in (0, 2, 0):
        for place, layer in enumerate(layers):
            row = torch.full((1, 2), value) if place < bad else torch.ones(1, 2)
            layer(row).sum().backward()
        workers.next()
    assert workers.stop().non_finite.tolist() == [0, 2, 0]


def test_workers_that_agree_have_cosine_one_and_opposed_ones_less():
    cosines = cosines_to_mean(torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]))
    assert cosines.tolist() == pytest.approx([1.0, 1.0, -1.0])


def language_model(kind, implementation):
    torch.manual_seed(0)
    config = (
        MixtralConfig(**SMALL, num_local_experts=4) if kind == "mixtral" else LlamaConfig(**SMALL)
    )
    config._attn_implementation = implementation
    return (MixtralForCausalLM if kind == "mixtral" else LlamaForCausalLM)(config)


TOKENS = torch.arange(40).reshape(2, 20) % 64


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_attention_logits_are_the_same_however_they_are_computed(kind):
    seen = {}
    for implementation in ("sdpa", "eager"):
        model = language_model(kind, implementation)
        probes = ForwardProbes(model)
        with probes.measuring():
            model(input_ids=TOKENS)
        seen[implementation] = probes.read()
    fused, plain = seen["sdpa"], seen["eager"]
    assert fused["attention_logit_max"] == pytest.approx(plain["attention_logit_max"], rel=1e-4)
    assert ("router_load" in fused) == (kind == "mixtral")


def test_the_router_load_is_that_of_the_chosen_experts():
    model = language_model("mixtral", "sdpa")
    probes = ForwardProbes(model)
    with probes.measuring():
        logits = model(input_ids=TOKENS, output_router_logits=True).router_logits
    loads = []
    for layer in logits:
        chosen = layer.topk(2, dim=-1).indices.flatten()
        loads.append(max((chosen == expert).float().mean().item() for expert in range(4)) * 4)
    assert probes.read()["router_load"] == pytest.approx(max(loads))
    assert max(loads) > 1.0


def test_headroom_is_counted_in_powers_of_two():
    model = nn.Linear(1, 1, bias=False).half()
    with torch.no_grad():
        model.weight.fill_(2.0)
    probes = ForwardProbes(model)
    with probes.measuring():
        model(torch.tensor([[16.0]], dtype=torch.float16))
    largest = torch.finfo(torch.float16).max
    assert probes.read()["activation_headroom"] == pytest.approx(math.log2(largest / 32.0))
    with probes.measuring():
        model(torch.tensor([[math.inf]], dtype=torch.float16))
    assert probes.read()["activation_headroom"] == -math.inf


def test_armed_probes_see_training_passes_only():
    model = language_model("llama", "sdpa")
    probes = ForwardProbes(model)
    probes.arm()
    model.eval()
    model(input_ids=TOKENS)
    model.train()
    with torch.no_grad():
        model(input_ids=TOKENS)
    assert probes.read() == {}
    model(input_ids=TOKENS)
    assert set(probes.read()) == {"activation_headroom", "attention_logit_max"}
    probes.remove()


def test_an_interrupted_pass_leaves_nothing_behind():
    class Interrupted(nn.Linear):
        def forward(self, x):
            raise KeyboardInterrupt  # which torch does not pass to its hooks

    probes = ForwardProbes(model := Interrupted(1, 1))
    probes.arm()
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 1))
    probes.remove()
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_an_armed_model_is_not_watched(how):
    model = language_model("llama", "sdpa").train()
    probes = ForwardProbes(model)
    probes.arm()
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    hooks = [hook for m in copied.modules() for hook in m._forward_hooks.values()]
    copied(input_ids=TOKENS)
    assert hooks
    assert all(hook._call is None for hook in hooks)
    assert probes.read() == {}
    probes.remove()


def test_the_parts_of_a_model_that_is_never_called_whole_are_seen():
    model = nn.ModuleDict({"body": language_model("llama", "sdpa"), "heads": nn.ModuleList()})
    probes = ForwardProbes(model)
    probes.arm()
    model["body"](input_ids=TOKENS)
    seen = probes.read()
    probes.remove()
    alone = ForwardProbes(model["body"])
    with alone.measuring():
        model["body"](input_ids=TOKENS)
    assert seen == alone.read()


def test_a_mask_may_have_any_shape_that_attention_takes():
    query = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    causal = torch.ones(5, 5).tril().bool()
    expected = _largest_logit(query, query, query, is_causal=True)
    for mask in (causal, causal[None], causal[None, None], causal.expand(2, 3, 5, 5)):
        assert _largest_logit(query, query, query, attn_mask=mask) == expected
    floats = torch.zeros(5, 5).masked_fill(~causal, -math.inf)
    assert _largest_logit(query, query, query, attn_mask=floats) == expected


def test_what_cannot_be_looked_at_does_not_stop_the_model(caplog):
    class OddRouter(nn.Module):
        num_experts = 2

        def forward(self, x):
            return x, torch.full((3,), -1)  # no expert chosen

    model = nn.ModuleDict({"router": OddRouter()})
    probes = ForwardProbes(model)
    with probes.measuring():
        for _ in range(2):
            model["router"](torch.ones(3, 2))
    assert probes.read() == {}
    words = "rmetric: a forward probe failed and does nothing any more: RuntimeError: "
    assert [message.startswith(words) for message in caplog.messages] == [True]


@pytest.mark.parametrize("how", ["before", "before, norm passed", "after", "monitor", "never"])
def test_gradients_that_are_clipped_before_the_check_are_reported_once(how, caplog):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer)
    for _, loss in backward_passes(model, 120, optimizer):
        norm = None
        if how.startswith("before"):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        monitor.check_before_step(loss, gradient_norm=norm if "passed" in how else None)
        if how == "after":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        elif how == "monitor":
            monitor.clip_grad_norm_(0.05)
        optimizer.step()
    monitor.close()
    reports = [text for text in caplog.messages if "clipped before the check" in text]
    assert len(reports) == (how == "before")
    for report in reports:
        assert "the gradient norm was 0.05 in 50 of the last 50 steps" in report
        assert "gradient_norm=norm" in report
