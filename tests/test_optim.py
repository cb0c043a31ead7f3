"""``lrpe_adam``: which parameters are decayed, in every kind of precision; and half precision that
is resumed."""

import io
import math

import pytest
import torch
from fairseq import optim, utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import lr_scheduler
from fairseq.optim.adam import Adam
from omegaconf import OmegaConf
from torch import nn

from lrpe_fairseq.compat import few_launches, half_precision
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.errors import Refusal
from tests.test_every_encoding import NAMES, encoding_of

UNFLAT = {"fp16_no_flatten_grads": True}
WRAPPERS = {
    "float32": (optim, {}),
    "bf16": (optim.FP16Optimizer, {"bf16": True}),
    "fp16 without flat gradients": (optim.FP16Optimizer, UNFLAT),
    "memory-efficient": (optim.MemoryEfficientFP16Optimizer, {"bf16": True}),
}


DEFAULTS = OmegaConf.structured(FairseqConfig)


def config(name="lrpe_adam", decay=0.5, **common):
    """fairseq's whole configuration, which a YAML and its defaults give."""
    given = {"_name": name, "weight_decay": decay, "adam_betas": "(0.9, 0.999)"}
    chosen = {"optimizer": given, "common": common, "optimization": {"lr": [0.1]}}
    return OmegaConf.merge(DEFAULTS, chosen)


def model():
    """A matrix, a bias, the two vectors of a norm, and a number."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    made.register_parameter("number", nn.Parameter(torch.tensor(2.0)))
    return made


def trained(kind, built, name="lrpe_adam"):
    """The optimizer after one update with gradients of zero."""
    wrapper, common = WRAPPERS[kind]
    known = config(name, **common)
    given = known.optimizer if wrapper is optim else known
    made = wrapper.build_optimizer(given, list(built.parameters()))
    made.zero_grad()
    made.backward(sum(0 * parameter.sum() for parameter in built.parameters()))
    made.step()
    return made


@pytest.mark.parametrize("kind", WRAPPERS)
def test_without_gradients_matrices_shrink_and_vectors_stay(kind):
    built, start = model(), {name: p.clone() for name, p in model().named_parameters()}
    trained(kind, built)
    for name, parameter in built.named_parameters():
        kept = 1 - 0.1 * 0.5 if name == "0.weight" else 1
        torch.testing.assert_close(parameter.detach(), start[name].detach() * kept)


ANGLES = {"theta", "frequency", "offset", "row", "column", "entries", "lower", "p"}
"""Last parts of the names of parameters that are angles, frequencies or generators."""


@pytest.mark.parametrize("optimizer", ["lrpe_adam", "adam"])
def test_no_angle_of_an_encoding_is_decayed(optimizer):
    known = config(optimizer).optimizer
    for name in NAMES:
        kerple = name.startswith(("kerple", "cape-kerple"))
        built = nn.ModuleList([encoding_of(name), nn.Linear(2, 2)])
        made = optim.build_optimizer(known, list(built.parameters()))
        spared = {id(p) for g in made.param_groups if not g["weight_decay"] for p in g["params"]}
        for full, parameter in built.named_parameters():
            end = full.rpartition(".")[2]
            ours = parameter.requires_grad and (end in ANGLES or parameter.dim() <= 1)
            by_any_adam = (kerple and end in ("r1", "r2")) or end == "log_theta"
            expected = ours if optimizer == "lrpe_adam" else by_any_adam
            assert (id(parameter) in spared) == expected, f"{name}: {full}"


@pytest.mark.parametrize("kind", WRAPPERS)
def test_half_types_leave_angles_and_the_parameters_of_kerple_undecayed(kind):
    for name, optimizer in (("rope-2d-mixed", "lrpe_adam"), ("kerple-log", "adam")):
        options = EncodingOptions(grid_width=2 * (name != "kerple-log"))
        built = nn.ModuleList([build_encoding(name, 8, 2, options=options), nn.Linear(2, 2)])
        start = {key: p.detach().clone() for key, p in built.named_parameters()}
        trained(kind, built, optimizer)
        changed = {key for key, p in built.named_parameters() if not torch.equal(p, start[key])}
        assert changed == {"1.weight"} | ({"1.bias"} if optimizer == "adam" else set())


def test_an_override_on_resuming_changes_the_decay_of_matrices_only():
    made, other = (trained("float32", model()) for _ in range(2))
    made.load_state_dict(other.state_dict(), {"weight_decay": 0.3, "lr": 0.2})
    decays = [(group["weight_decay"], group["lr"]) for group in made.param_groups]
    assert decays == [(0.3, 0.2), (0.0, 0.2)]


def test_flat_gradients_are_refused_in_one_sentence():
    flat = nn.Parameter(torch.zeros(9))
    with pytest.raises(Refusal, match=r"--fp16-no-flatten-grads to --fp16, or use --bf16$"):
        optim.build_optimizer(config().optimizer, [{"cpu": flat}])  # as fairseq's fp16 calls it


def test_both_groups_have_the_options_and_the_update_of_adam():
    ours, theirs = (model() for _ in range(2))
    for built, name in ((ours, "lrpe_adam"), (theirs, "adam")):
        made = optim.build_optimizer(config(name, 0.0).optimizer, list(built.parameters()))
        for step in range(3):
            built(torch.arange(6.0).view(2, 3) + step).square().sum().backward()
            made.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_lrpe_cosine_counts_from_the_first_update():
    """timm's CosineLRScheduler with warmup_prefix=False: t / T includes the warm-up."""
    known = config()
    chosen = {"_name": "lrpe_cosine", "warmup_updates": 20, "warmup_init_lr": 0.0, "min_lr": 0.01}
    known = OmegaConf.merge(known, {"lr_scheduler": chosen, "optimization": {"max_update": 300}})
    schedule = lr_scheduler.build_lr_scheduler(known.lr_scheduler, trained("float32", model()))
    rates = [schedule.step_update(n) for n in (0, 10, 19, 20, 150, 300)]
    top = [0.01 + 0.045 * (1 + math.cos(math.pi * n / 300)) for n in (20, 150, 300)]
    assert rates == pytest.approx([0.0, 0.05, 0.095, *top])


@pytest.mark.parametrize("option", ["t_mult", "lr_shrink"])
def test_lrpe_cosine_refuses_options_of_restarts(option):
    chosen = {"_name": "lrpe_cosine", option: 0.5}
    known = OmegaConf.merge(config(), {"lr_scheduler": chosen, "optimization": {"max_update": 9}})
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(Refusal, match=f"lrpe_cosine has no restarts: leave out {flag} 0.5$"):
        lr_scheduler.build_lr_scheduler(known.lr_scheduler, trained("float32", model()))


def test_the_trapezoid_needs_a_number_of_updates_and_one_rate():
    with pytest.raises(Refusal, match=r"needs the number of updates: pass --max-update$"):
        trapezoid(0, warmup_updates=0)
    with pytest.raises(Refusal, match=r"reads one --lr, not \[0.1, 0.2\]$"):
        trapezoid(300, rates=[0.1, 0.2])


def trapezoid(updates, rates=(0.1,), **options):
    chosen = {"_name": "lrpe_trapezoid", "warmup_updates": 20, **options}
    merged = {"lr_scheduler": chosen, "optimization": {"max_update": updates, "lr": [*rates]}}
    known = OmegaConf.merge(config(), merged)
    return lr_scheduler.build_lr_scheduler(known.lr_scheduler, trained("float32", model()))


def test_the_trapezoid_rises_stays_and_falls_linearly_to_zero():
    schedule, longer = trapezoid(300), trapezoid(600)
    rates = [schedule.step_update(n) for n in (0, 9, 19, 100, 240, 270, 299, 300)]
    assert rates == pytest.approx([0.005, 0.05, 0.1, 0.1, 0.1, 0.05, 0.1 / 60, 0.0])
    until_the_decay = range(241)
    assert [schedule.step_update(n) for n in until_the_decay] == [
        longer.step_update(n) for n in until_the_decay
    ]
    assert schedule.step_update(241) < longer.step_update(241)
    assert trapezoid(300, warmup_init_lr=0.02).step_update(9) == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"decay_share": 0.0}, "--decay-share must be above 0"),
     ({"decay_share": 1.5}, "--decay-share must be above 0"),
     ({"warmup_updates": 241}, "does not end before the decay")],
)  # fmt: skip
def test_a_trapezoid_without_room_is_refused(options, said):
    with pytest.raises(Refusal, match=said):
        trapezoid(300, **options)


HALVES = {  # the loss scaler doubles its scale at the updates 3 and 6
    "bf16": ("lrpe_adam", torch.bfloat16, {"bf16": True}),
    "fp16": ("adam", torch.half, {"fp16": True}),
    "fp16 without flat gradients": ("lrpe_adam", torch.half, {"fp16": True, **UNFLAT}),
    "memory-efficient bf16": ("lrpe_adam", torch.bfloat16, {"memory_efficient_bf16": True}),
    "memory-efficient fp16": ("lrpe_adam", torch.half, {"memory_efficient_fp16": True}),
}


@pytest.fixture(params=HALVES)
def half(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # of flat gradients: the CPU
    return request.param


def in_half(kind, state=None):
    """A model in half precision, but for its number, and its optimizer; both as saved."""
    name, dtype, common = HALVES[kind]
    built = model().to(dtype)
    built.number.data = built.number.data.float()
    if state:
        built.load_state_dict(state["model"])
    efficient = next(iter(common)).startswith("memory")
    wrapper = optim.MemoryEfficientFP16Optimizer if efficient else optim.FP16Optimizer
    common = {**common, "bf16": dtype is torch.bfloat16, "fp16_scale_window": 3}
    made = wrapper.build_optimizer(config(name, **common), list(built.parameters()))
    if state:
        made.load_state_dict(state["optimizer"])
    return built, made


def train(built, made, updates):
    """What a trainer saves after these updates, read again."""
    made.set_lr(0.01)
    for update in updates:
        made.zero_grad()
        inputs = torch.arange(6.0).view(2, 3).add(update).to(built[0].weight.dtype)
        made.backward((built(inputs) * built.number).square().mean())
        made.clip_grad_norm(0.0)
        made.step()
    stored = {"model": built.state_dict(), "optimizer": made.state_dict()}
    torch.save(utils.move_to_cpu(stored), buffer := io.BytesIO())
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def test_a_resumed_training_in_half_precision_is_the_uninterrupted_one(half):
    whole = train(*in_half(half), range(6))
    resumed = train(*in_half(half, train(*in_half(half), range(4))), range(4, 6))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.mark.parametrize("change", ["a model of its own", "no float32 weights"])
def test_float32_weights_are_those_of_the_model_of_a_checkpoint(half, change):
    state = train(*in_half(half), range(4))
    if change == "no float32 weights":  # as fairseq saves it
        del state["optimizer"]["fp32_params"]
        state["optimizer"].pop("loss_scaler", None)
    else:  # as an average of checkpoints
        state["model"]["0.weight"] *= 0.5
    built, made = in_half(half, state)
    loaded = built.state_dict()
    for name, weight in state["model"].items():
        assert torch.equal(loaded[name].float(), weight), name
    masters = [weight.flatten() for weight in half_precision.masters(made)]
    if masters:
        weights = [parameter.detach().float().flatten() for parameter in built.parameters()]
        assert torch.equal(torch.cat(masters), torch.cat(weights))


def updated(step, given, updates=3):
    """Parameters and state of fairseq's Adam after some updates; one has no gradient at first."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (4,), ())]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    made = Adam(groups, lr=0.1, betas=(0.9, 0.98), **given)
    for update in range(updates):
        for index, parameter in enumerate(parameters):
            late = index == 1 and update == 0
            parameter.grad = None if late else torch.randn_like(parameter)
        step(made)
    return parameters, made.state_dict()


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam_on_all_parameters_at_once_is_fairseqs(decay):
    def at_once(made):
        for group in made.param_groups:
            few_launches.step_at_once(group, made.state)

    given = {"weight_decay": decay, "eps": 1e-3}
    found, state = updated(at_once, given)
    wanted, known = updated(Adam.step, given)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert state["param_groups"] == known["param_groups"]
    for index, of_one in known["state"].items():
        assert state["state"][index].keys() == of_one.keys()
        assert all(
            torch.equal(*map(torch.as_tensor, (state["state"][index][n], x)))
            for n, x in of_one.items()
        )


def test_an_update_before_any_gradient_is_fairseqs():
    """A closure computes the gradients within the step, and they may be on a CPU."""
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))

    def closure():
        parameter.grad = torch.full_like(parameter, 1e-4)

    Adam([parameter], lr=0.1).step(closure)
    torch.testing.assert_close(
        parameter.detach(), torch.full_like(parameter, 0.9), atol=1e-2, rtol=0
    )


def test_the_norm_of_all_gradients_at_once_is_fairseqs():
    grads = [torch.randn(3, 2), torch.randn(5).bfloat16(), torch.randn(())]
    wanted = torch.cat([x.float().flatten() for x in grads]).norm()
    torch.testing.assert_close(few_launches.total_norm(grads), wanted)
