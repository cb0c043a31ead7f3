"""Algebraic encodings against explicit products, the group law, and the equalities with RoPE."""

import itertools

import pytest
import torch
from torch import nn

from lrpe_fairseq.attention.multihead import MultiheadAttention, feature_map
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.core.positions import PositionCache
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.encodings.rotations import generators as rotations_module
from lrpe_fairseq.encodings.rotations.generators import definition as power_definition
from lrpe_fairseq.encodings.rotations.generators import generator_of, turn
from lrpe_fairseq.encodings.trees import nodes
from lrpe_fairseq.encodings.trees.algebraic import bands
from lrpe_fairseq.encodings.trees.products import definition as step_by_step
from lrpe_fairseq.encodings.trees.products import tree_turn
from lrpe_fairseq.errors import ChoiceError
from tests.pairwise import pairwise
from tests.references import gradients_in_and_out_of_autocast, score_matrix

HEADS, D = 2, 8


def build(components="sequence", head_dim=D, seed=0, fidelity=(), grid_width=0, **options):
    given = EncodingOptions(frozenset(fidelity), grid_width, **options)
    encoding = build_encoding(f"ape:{components}", head_dim, HEADS, seed=seed, options=given)
    return encoding.double().eval()


def trained(encoding, seed=3):
    """Move every parameter, so that nothing is as it starts."""
    for parameter in encoding.parameters():
        parameter.data += 0.3 * normal(*parameter.shape, seed=seed)
    return encoding


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def operator(encoding, position):
    """M(p) of every head, (H, D, D): the encoding of the unit vectors."""
    eye = torch.eye(encoding.spec.head_dim, dtype=torch.float64)
    x = eye.expand(1, encoding.spec.num_heads, -1, -1)
    at = torch.full((len(eye),), position)
    return encoding(x, x, at, at)[0][0].mT


def test_a_cycle_returns_to_its_start():
    encoding = trained(build("cycle7"))
    for position in (0, 3, 6):
        assert torch.equal(operator(encoding, position), operator(encoding, position + 7 * 10**6))
    assert (operator(encoding, 3) - operator(encoding, 4)).abs().max() > 0.1


def explicit(encoding, x, positions):
    """M(p) x from matrix exponentials, one product per token, head and step; x (B, H, T, D)."""
    out, width = x.clone(), encoding.width
    for number, component in enumerate(encoding.components):
        skew = component.generator()
        own = slice(number * width, (number + 1) * width)
        rows = positions.expand(x.shape[0], -1)
        for b in range(x.shape[0]):
            for t in range(x.shape[2]):
                for h in range(x.shape[1]):
                    code, m = rows[b, t].item(), torch.eye(width, dtype=torch.float64)
                    if skew.dim() == 3:
                        m = torch.matrix_exp(code * skew[h])
                    while skew.dim() == 4 and code > 0:
                        m = torch.matrix_exp(skew[(code - 1) % len(skew), h]) @ m
                        code = (code - 1) // len(skew)
                    out[b, h, t, own] = m @ x[b, h, t, own]
    return out


def gradients(out, inputs):
    loss = (normal(*out.shape, seed=9) * out.sin()).sum()
    return [out.detach(), *torch.autograd.grad(loss, inputs, retain_graph=True)]


AT = torch.tensor([0, 1, 2, 5, 5, 11, 30])
ROWS = torch.stack([AT, AT.flip(0)])


@pytest.mark.parametrize(
    ("components", "start", "positions"),
    pairwise(
        ["sequence", "tree2", "tree3+sequence"], ["rope", "identity", "zero", "trained"], [AT, ROWS]
    ),
)
def test_outputs_and_gradients_equal_explicit_products(components, start, positions):
    encoding = build(components, ape_init="identity" if start == "identity" else "rope")
    if start == "trained":
        trained(encoding)
    if start == "zero":
        nn.init.zeros_(encoding.components[0].generator.entries)
    x = normal(2, HEADS, 7, D).requires_grad_()
    inputs = [x, *encoding.parameters()]
    wanted = gradients(explicit(encoding, x, positions), inputs)
    both = encoding(x, x, positions, positions)
    apart = encoding(x, x, positions, positions.clone())
    for found in (both[0], both[1], apart[1]):
        torch.testing.assert_close(gradients(found, inputs), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gap", [0.0, 1e-14, 1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1])
def test_gradients_of_powers_are_right_for_every_gap_between_angles(gap, dtype):
    p = torch.linalg.qr(normal(6, 6))[0]
    theta = torch.tensor([0.7, 0.7 + gap, gap], dtype=torch.float64)
    skew = (p @ generator_of(theta, 6) @ p.mT)[None].requires_grad_()
    x, weights = normal(1, 3, 40, 6), normal(1, 3, 40, 6, seed=1)
    u = torch.arange(40).double()[None]
    grads = []
    for compute, given in ((turn, x.to(dtype)), (power_definition, x)):
        out = compute(given, skew - skew.mT, u)
        grads.append(torch.autograd.grad((out.double() * weights).sum(), skew)[0])
    limit = 1e-10 if dtype == torch.float64 else 2e-5
    assert (grads[0] - grads[1]).norm() < limit * grads[1].norm()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("batched", [False, True])
def test_climbing_together_equals_products_of_every_token_with_every_matrix(k, batched):
    """Duplicates, nodes without their ancestors, and a batch that shares its nodes or does not."""
    matrices = torch.matrix_exp(normal(k, HEADS, D, D) - normal(k, HEADS, D, D).mT)
    matrices.requires_grad_()
    x = normal(2, HEADS, 9, D).requires_grad_()
    at = torch.tensor([30, 0, 7, 7, 31, 2, 11, 40, 0]).clamp_max(40 if k > 1 else 12)
    at = torch.stack([at, at.flip(0)]) if batched else at
    found = gradients(tree_turn(x, matrices, at, PositionCache()), [x, matrices])
    wanted = gradients(step_by_step(x, matrices, at), [x, matrices])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_frozen_tree_has_the_gradient_of_its_input_only():
    matrices = torch.matrix_exp(normal(2, HEADS, D, D) - normal(2, HEADS, D, D).mT)
    x, at = normal(1, HEADS, 4, D).requires_grad_(), torch.tensor([0, 2, 5, 12])
    found = gradients(tree_turn(x, matrices, at, PositionCache()), [x])
    torch.testing.assert_close(found, gradients(step_by_step(x, matrices, at), [x]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("components", "head_dim"), [("sequence", 5), ("sequence", 8), ("tree2", 5)]
)
def test_autocast_does_not_round_the_gradients(components, head_dim, dtype):
    encoding = build(components, head_dim).float()
    x = normal(1, HEADS, 6, head_dim).float().requires_grad_()
    wanted, found = gradients_in_and_out_of_autocast(encoding, x, torch.arange(6), dtype)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("components", ["sequence", "tree2"])
def test_accumulated_gradients_equal_those_of_one_batch(components):
    """Caches hold nothing of a graph that was freed."""
    encoding, x, at = build(components), normal(4, HEADS, 5, D), torch.arange(5)
    (entries,) = encoding.parameters()
    for part in (x[:2], x[2:]):
        encoding(part, part, at, at)[0].sin().square().sum().backward()
    halves, entries.grad = entries.grad, None
    encoding(x, x, at, at)[0].sin().square().sum().backward()
    torch.testing.assert_close(halves, entries.grad)


@pytest.mark.parametrize("components", ["sequence", "tree2"])
def test_an_edit_through_data_is_seen_and_an_eigenbasis_is_computed_once(components, monkeypatch):
    """fairseq's optimizers edit parameters through ``.data``, which no version counts."""
    counted, original = [], rotations_module.eigenbasis

    def eigenbasis(skew):
        counted.append(skew.shape)
        return original(skew)

    monkeypatch.setattr(rotations_module, "eigenbasis", eigenbasis)
    layers = nn.ModuleList(build(components, seed=s) for s in range(3))
    share_across_layers(layers)
    x, at = normal(1, HEADS, 5, D), torch.arange(5)
    first = [layer(x, x, at, at)[0] for layer in layers]
    assert len(counted) == 1
    layers[0].components[0].generator.entries.data.mul_(0.5)
    second = [layer(x, x, at, at)[0] for layer in layers]
    assert len(counted) == 2
    for outs in (first, second):
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])
    assert (first[0] - second[0]).abs().max() > 0.01


@pytest.mark.parametrize("head_dim", [8, 9])
@pytest.mark.parametrize("generator", ["exponential", "canonical"])
def test_at_the_start_it_is_rope(generator, head_dim):
    encoding = build("sequence", head_dim=head_dim, ape_generator=generator)
    x, at = normal(2, HEADS, 6, head_dim), torch.tensor([0, 1, 2, 31, 512, 100_000])
    learned = build_encoding("lrpe:identity:rotation-learned", head_dim, HEADS)  # float32 angles
    torch.testing.assert_close(encoding(x, x, at, at), learned(x, x, at, at), rtol=0, atol=1e-10)
    exact = bands(head_dim).expand(HEADS, -1)
    component = encoding.components[0]
    if generator == "canonical":
        component.theta.data = exact.clone()
    else:
        component.generator.entries.data = generator_of(exact, head_dim)[
            ..., *rotations_module.triangle(head_dim)
        ]
    rope = build_encoding("rope", head_dim, HEADS)
    torch.testing.assert_close(encoding(x, x, at, at), rope(x, x, at, at), rtol=0, atol=1e-10)


def test_canonical_with_a_householder_matrix_is_lrpe_with_learned_angles():
    encoding = build("sequence", ape_generator="canonical")
    lrpe = build_encoding("lrpe:householder:rotation-learned", D, HEADS).double()
    reflection = lrpe.projection(torch.eye(D, dtype=torch.float64))[0].expand(HEADS, -1, -1)
    encoding.components[0].projection.forward = lambda: reflection
    lrpe.core.theta.data += 0.1 * normal(D // 2)
    encoding.components[0].theta.data = lrpe.core.theta.data.expand(HEADS, -1).clone()
    x, at = normal(2, HEADS, 6, D), torch.arange(6) * 1009
    torch.testing.assert_close(
        encoding(x, 2 * x, at, at), lrpe(x, 2 * x, at, at), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ape", {}),
        ("ape:sequence+cycle7", {}),
        ("ape:sequence+cycle7", {"ape_generator": "canonical"}),
        ("liere", {"rotation_block": 4}),
        ("comrope-ap", {"rotation_block": 6}),
        ("comrope-ld", {"rotation_block": 4}),
    ],
)
def test_eigenvectors_fold_into_the_projections(name, options, attention):
    """Outputs, gradients and incremental outputs are those of the explicit rotations."""
    module = MultiheadAttention(
        24, 2, attention_type=attention, position_encoding=name, causal=True,
        normalizer="layernorm", options=EncodingOptions(**options),
    ).double()  # fmt: skip
    trained(module.encoding)
    for projection in (module.q_proj, module.k_proj):
        projection.bias.data = normal(24)
    x, results = normal(3, 11, 24).requires_grad_(), []
    fold = module.encoding.fold
    assert fold() is not None
    for module.encoding.fold in (fold, lambda: None):
        out = module.attend(x)[0]
        grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        state, parts = None, []
        for part in x.detach().split([9, 1, 1], 1):
            step, state = module.attend(part, state=state, keep_state=True)
            parts.append(step)
        torch.testing.assert_close(torch.cat(parts, 1), out)
        results.append([out, *grads])
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-8)


def test_a_sum_on_a_grid_is_one_sequence_for_each_axis():
    encoding = trained(build("sequence+sequence", grid_width=5))
    at, x = torch.arange(20), normal(1, HEADS, 20, D)
    halves = []
    for number, axis in enumerate((at // 5, at % 5)):
        half = build("sequence", head_dim=D // 2)
        half.components[0].load_state_dict(encoding.components[number].state_dict())
        part = x[..., number * D // 2 : (number + 1) * D // 2]
        halves.append(half(part, part, axis, axis)[0])
    torch.testing.assert_close(encoding(x, x, at, at)[0], torch.cat(halves, -1))
    axial = EncodingOptions(grid_width=5, position_grid="axial")
    start = build("sequence+sequence", grid_width=5)
    same = build_encoding("ape", D, HEADS, options=axial).double()
    torch.testing.assert_close(start(x, x, at, at), same(x, x, at, at))


def test_features_that_fill_no_slice_are_unchanged():
    encoding, x, at = build("sequence+tree2", head_dim=11), normal(1, HEADS, 4, 11), torch.arange(4)
    out = encoding(x, x, at + 3, at + 3)[0]
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert (out[..., :8] - x[..., :8]).abs().min() > 0


@pytest.mark.parametrize(
    ("components", "options", "message"),
    [
        ("tree2", {"ape_generator": "canonical"}, "have no canonical form"),
        ("cycle1", {}, "cycles 2 to 2,147,483,648 positions"),
        ("tree1000", {}, "1 to 256 branches"),
        ("sequence+sequence+sequence", {"grid_width": 4}, "one row and one column"),
        ("sequence+sequence+sequence+sequence+sequence", {}, "head width of at least 2"),
        ("ring", {}, "unknown position encoding 'ape:ring'"),
    ],
)
def test_what_cannot_be_built_is_refused(components, options, message):
    with pytest.raises(ChoiceError, match=message):
        build(components, **options)


def test_negative_positions_are_no_nodes():
    x, at = normal(1, HEADS, 2, D), torch.tensor([0, -1])
    with pytest.raises(ValueError, match="codes of its nodes, which are not negative"):
        build("tree2")(x, x, at, at)


def test_half_of_the_bands_twice_and_reversed():
    encoding = build("sequence", head_dim=64, fidelity=["ape-half-bands"])
    theta = 10000.0 ** (-torch.arange(0, 32, 2).double() / 32).repeat_interleave(2)
    skew = generator_of(-theta, 64).expand(HEADS, -1, -1)
    torch.testing.assert_close(encoding.components[0].generator(), skew, rtol=1e-6, atol=1e-8)


def test_a_full_matrix_starts_alike_and_moves_twice():
    x, at = normal(1, HEADS, 5, D), torch.arange(5)
    plain, full = build("sequence"), build("sequence", fidelity=["ape-full-matrix"])
    torch.testing.assert_close(plain(x, x, at, at), full(x, x, at, at))
    (entries,) = full.parameters()
    full(x, x, at, at)[0].sin().sum().backward()
    torch.testing.assert_close(entries.grad, -entries.grad.mT)
    assert entries.grad.abs().max() > 0


def test_equal_branches_commute_and_shifted_paths_are_those_of_the_next_node():
    equal = build("tree2", fidelity=["ape-equal-branches"])
    torch.testing.assert_close(operator(equal, 1), operator(equal, 2))
    plain, shifted = build("tree2"), build("tree2", fidelity=["ape-shifted-paths"])
    for node in (0, 1, 6):
        assert torch.equal(operator(shifted, node), operator(plain, node + 1))


def test_shared_heads_of_a_tree_have_one_set_of_operators():
    encoding = trained(build("tree2", fidelity=["ape-tree-shared-heads"]))
    found = operator(encoding, 9)
    assert torch.equal(found[0], found[1])
    assert next(encoding.parameters()).shape[1] == 1


def test_a_tree_that_is_too_deep_is_refused():
    node = 0
    for _ in range(62):
        node = nodes.child(node, 1, 2)
    with pytest.raises(ValueError, match=r"too deep: with 2 branches .* down to depth 62"):
        nodes.child(node, 1, 2)
    with pytest.raises(ValueError, match="too deep"):
        nodes.concat(torch.tensor(node), torch.tensor([0, 1]), 2)
    with pytest.raises(ValueError, match="branches 0 to 1"):
        nodes.child(0, 2, 2)


def test_domains_agree_with_search_in_the_graph():
    count = 20
    for k in (2, 3):
        codes = torch.arange(count)
        up = {n: (n - 1) // k for n in range(1, count)}

        def path(n, up=up):
            return [n, *path(up[n])] if n else [0]

        for a in range(0, count, 5):
            found = nodes.tree_distance(torch.tensor(a), codes, k).tolist()
            for b in range(count):
                assert found[b] == len(set(path(a)) ^ set(path(b)))
            assert nodes.depth(codes, k)[a] == len(path(a)) - 1


def random_tree(generator, k, depth):
    """A random tree as nested lists of k-ary nodes."""
    count = 0 if not depth else int(torch.randint(0, k + 1, (), generator=generator))
    return [random_tree(generator, k, depth - 1) for _ in range(count)]


@pytest.mark.parametrize("order", ["breadth", "depth"])
def test_codes_from_arities_are_those_of_a_recursive_enumeration(order):
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        tree = random_tree(generator, 3, 4)

        def walk(node, code):
            below = (walk(c, nodes.child(code, b, 3)) for b, c in enumerate(node))
            return [(code, node), *itertools.chain(*below)]

        pairs = walk(tree, 0)
        if order == "breadth":
            pairs = sorted(pairs, key=lambda pair: pair[0])
        arities = [len(node) for _, node in pairs]
        codes = nodes.codes_from_arities(arities, 3, order)
        assert codes == [code for code, _ in pairs]
        half = len(arities) // 2
        assert nodes.codes_from_arities(arities[:half], 3, order) == codes[:half]
        assert nodes.codes_from_arities([*arities, 0], 3, order) == [*codes, 0]


def test_the_locality_factor_counts_steps_in_every_domain():
    at = torch.tensor([0, 1, 2, 5, 6])

    def steps(components, **options):
        factor = build(components, ape_decay=0.5, **options).form(None, torch.arange(1)).factor
        return (-factor(at[:2], at).log2()).tolist()

    assert steps("tree2") == [[0, 1, 1, 2, 2], [1, 0, 2, 3, 3]]
    assert steps("cycle7")[0] == [0, 1, 2, 2, 1]
    assert steps("sequence+cycle7")[0] == [0, 2, 4, 7, 7]
    assert steps("sequence+sequence", grid_width=4)[0] == [0, 1, 2, 2, 3]
    form = build("sequence", ape_decay=0.5).form(None, torch.arange(1))
    assert form.factor is None
    torch.testing.assert_close(form.score_decay.exp(), torch.full((HEADS,), 0.5))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["ape", "ape-tree"])
def test_the_locality_factor_multiplies_the_score(name, causal):
    def module_of(kind, decay):
        torch.manual_seed(0)
        options = EncodingOptions(ape_decay=decay)
        given = {"attention_type": kind, "position_encoding": name, "options": options}
        return MultiheadAttention(HEADS * D, HEADS, causal=causal, **given).double().eval()

    module, x, at = module_of("softmax", 0.8), normal(2, 6, HEADS * D), torch.arange(6)
    q, k, v = module._project(x)
    factor = 0.8 ** (at[:, None] - at).abs()
    if name == "ape-tree":
        factor = module.encoding.form(None, at).factor(at, at)
    scores = score_matrix(module_of("softmax", 1.0).encoding, q * D**-0.5, k, at, at) * factor
    hidden = torch.ones(6, 6).triu(1).bool() & causal
    wanted = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(
        module.attend(x)[0], module._project_out(wanted, x), rtol=0, atol=1e-6
    )
    if name == "ape-tree":
        with pytest.raises(ChoiceError, match="linear attention"):
            module_of("linear", 0.8)
        return
    q, k = (feature_map(x) for x in (q, k))
    scores = score_matrix(module_of("linear", 1.0).encoding, q, k, at, at) * factor
    scores = scores.masked_fill(hidden, 0.0)
    wanted = scores @ v / scores.sum(-1, keepdim=True)
    found = module_of("linear", 0.8).attend(x)[0]
    torch.testing.assert_close(found, module._project_out(wanted, x), rtol=0, atol=1e-6)
