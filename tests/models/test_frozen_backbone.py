"""A frozen backbone: held once, in no state and no message, bit-identical after training."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn import functional as F

from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.data.federation import Federation
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ModelError
from tailorfl.models.adapters import BottleneckAdapter
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.models.selectors import select
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

SHAPE = (1, 17, 17)
ENGINES = ("sequential", "vectorized")
NARROW = 8
"""Channels of the first stage where the subject is not the network of the paper, which has 64."""


def network(trainable: object = "adapter+head", seed: int = 3, **options: object) -> Model:
    return Model(
        lambda: build("resnet18", SHAPE, 10, adapters=True, dropout=0.3, **options),
        trainable=trainable,  # type: ignore[arg-type]
        seed=seed,
    )


def digits() -> Federation:
    return build_federation(
        "digits", samples=90, clients=3, partition="dirichlet", partition_options={"alpha": 1.0}
    )


@pytest.fixture(scope="module")
def federation() -> Federation:
    small = digits()
    wide = F.interpolate(small.source.x, size=SHAPE[1:])
    return replace(small, source=replace(small.source, x=wide))


def simulation(
    federation: Federation, method: str, engine: str, net: Model, options: dict[str, object] | None = None
) -> Simulation:
    train = TrainConfig(epochs=None, steps=2, batch_size=8, lr=0.05)
    return Simulation(
        make_method(method, options or {}), federation, net, train, engine=make_engine(engine), seed=3
    )


def frozen_tensors(net: Model) -> dict[str, torch.Tensor]:
    tensors = {**dict(net.module.named_parameters()), **dict(net.module.named_buffers())}
    return {name: tensors[name] for name in net.frozen}


def test_the_state_is_the_trainable_part() -> None:
    with torch.device("meta"):
        net, whole = network(), network("all")
    picked = select(net.module, "adapter+head")
    assert net.scalars == 1_413_258  # as the paper counts the adapter set
    assert sum(net.sizes.values()) + net.held_scalars == sum(t.numel() for t in whole.init(3).values())
    assert set(net.init(3).keys()) == set(net.sizes) == picked
    assert net.frozen == set(whole.sizes) - picked
    split = net.split("head")
    assert set(split.frozen) == net.frozen
    assert split.personal == ("fc.weight", "fc.bias")
    assert set(split.shared) == picked - {"fc.weight", "fc.bias"}


def test_outputs_are_those_of_the_whole_network() -> None:
    net, whole = network(width=NARROW), network("all", width=NARROW)
    x = torch.randn(4, *SHAPE)
    assert torch.equal(net(net.init(3), x), whole(whole.init(3), x))
    # Another start of the trainable part lies on the same backbone.
    mixed = TensorDict({**dict(whole.init(3).items()), **dict(net.init(8).items())})
    assert torch.equal(net(net.init(8), x), whole(mixed, x))


NETWORKS: dict[str, Callable[[], Model]] = {
    "backbone": lambda: network(width=NARROW),
    "lora": lambda: Model(lambda: build("vit", (1, 8, 8), 10, lora=2, lora_dropout=0.1)),
    "bottleneck": lambda: Model(lambda: build("vit", (1, 8, 8), 10, adapter_size=5, adapter_dropout=0.1)),
    "all": lambda: Model(lambda: build("resnet18", SHAPE, 10, adapters=True, norm="group", width=NARROW)),
}
WIDTHS = [NARROW * 2**stage for stage in range(4)]
NORMS = 2 * NARROW + 8 * sum(WIDTHS)
ADAPTERS = 4 * sum(w**2 + 2 * w for w in WIDTHS) + NORMS
"""Scalars of the adapters of the narrow ResNet-18 and of the norms of its blocks."""
CONVOLUTIONS = NARROW * 49 + 4 * 9 * NARROW**2 + sum(27 * w**2 + 9 * w**2 // 2 for w in WIDTHS[1:])
SHORTCUTS = sum(w**2 // 2 + 2 * w for w in WIDTHS[1:])
"""Scalars of its convolutions, and of the projections of its shortcuts with their norms."""
HEAD = 10 * (8 * NARROW + 1)
VIT_HEAD = 33 * 10


@pytest.mark.parametrize(
    ("name", "method", "options", "sent", "atol"),
    [
        pytest.param("backbone", "fedavg", {}, ADAPTERS + HEAD, 2e-4, marks=pytest.mark.slow),
        pytest.param("backbone", "ditto", {}, ADAPTERS + HEAD, 2e-4, marks=pytest.mark.slow),
        ("backbone", "fedrep", {"head_epochs": 1}, ADAPTERS, 2e-4),
        ("backbone", "scaffold", {}, 2 * (ADAPTERS + HEAD), 2e-4),
        ("lora", "fedavg", {}, 2 * 2 * 2 * 64 + VIT_HEAD, 1e-5),
        pytest.param("lora", "ditto", {}, 2 * 2 * 2 * 64 + VIT_HEAD, 1e-5, marks=pytest.mark.slow),
        ("bottleneck", "ditto", {}, 2 * (2 * (2 * 32 * 5 + 32 + 5) + 2 * 2 * 32) + VIT_HEAD, 1e-5),
        ("all", "fedalt", {"personal_part": "adapter"}, CONVOLUTIONS + SHORTCUTS + HEAD, 2e-4),
        ("all", "fedsim", {"personal_part": "adapter"}, CONVOLUTIONS + SHORTCUTS + HEAD, 2e-4),
    ],
)
def test_training_changes_and_sends_the_trainable_part_alone_in_both_engines(
    federation: Federation, name: str, method: str, options: dict[str, object], sent: int, atol: float
) -> None:
    """FedAvg on the LoRA part is FedIT; with the adapter partition the network without adapters is sent."""
    net = NETWORKS[name]()
    if name in ("lora", "bottleneck"):
        federation = digits()
    before = {n: t.clone() for n, t in frozen_tensors(net).items()}
    ends = []
    for engine in ENGINES:
        sim = simulation(federation, method, engine, net, options)
        start = net.init(3)
        sim.step()
        for n, tensor in frozen_tensors(net).items():
            assert torch.equal(tensor, before[n]), n
            assert tensor.grad is None
        assert not {p.rpartition("/")[2] for p in sim.dump()[0]} & net.frozen
        assert sim.traffic.up == 3 * sent
        ((_, models),) = sim.personal_models((0, 1, 2))
        ends.append(models)
        assert all(not torch.equal(models[n][0], start[n]) for n in net.parameters)
    for n in ends[0].keys():  # noqa: SIM118
        torch.testing.assert_close(ends[0][n], ends[1][n], atol=atol, rtol=10 * atol)
    if name == "all":
        kept, shared = models["layer1.0.adapter1.conv.weight"], models["conv1.weight"]
        assert not torch.equal(kept[0], kept[1])
        assert torch.equal(shared[0], shared[1])


def test_it_equals_the_whole_network_trained_in_that_part(federation: Federation) -> None:
    """`train=` on the whole network is the reference: same batches, same masks, frozen norms in evaluation mode."""
    net, whole = network(width=NARROW), network("all", width=NARROW)
    part = tuple(net.parameters)
    one, other = (simulation(federation, "fedavg", "sequential", n) for n in (net, whole))
    start = whole.init(3)

    def fit(train: tuple[str, ...] | None):
        return lambda client, _, received: (client.fit(received, train=train),)

    empty = TensorDict({}, batch_size=[3])
    (small,) = one.run((0, 1, 2), empty, net.init(3), fit(None))
    (large,) = other.run((0, 1, 2), empty, start, fit(part))
    for name in net.sizes:
        torch.testing.assert_close(small[name], large[name], atol=1e-6, rtol=1e-5)
    for name in net.frozen:
        assert all(torch.equal(large[name][i], start[name]) for i in range(3)), name


def test_frozen_batch_norms_do_not_forbid_padding_or_single_samples() -> None:
    head = Model(lambda: build("resnet18", SHAPE, 10, width=NARROW), trainable="head")
    assert not head.has_batch_statistics
    assert head.buffers == ()
    assert network(width=NARROW).has_batch_statistics


def test_running_statistics_go_with_the_parameters_of_their_norm() -> None:
    net = Model(lambda: build("resnet18", SHAPE, 10, width=NARROW), trainable=["bn1.weight"])
    assert net.parameters == ("bn1.weight",)
    assert set(net.buffers) == {"bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"}
    assert "bn1.bias" not in net.sizes


class Rotary(nn.Module):
    """A linear layer and a constant that no weight file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("angles", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x + self.angles)
        return out


def test_constants_of_a_module_are_no_part_of_its_state() -> None:
    net = Model(Rotary)
    assert net.frozen == {"angles"}
    state, x = net.init(0), torch.randn(5, 3)
    assert set(state.keys()) == {"linear.weight", "linear.bias"}
    torch.testing.assert_close(
        net(state, x), F.linear(x + torch.arange(3.0), state["linear.weight"], state["linear.bias"])
    )


def test_a_module_may_name_what_is_trained_by_default() -> None:
    class Named(Rotary):
        default_trainable = ("linear.bias",)

    assert Model(Named).parameters == ("linear.bias",)
    assert Model(Named, trainable="all").parameters == ("linear.weight", "linear.bias")


def test_parameters_of_an_own_module_that_need_no_gradient_are_frozen() -> None:
    backbone = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    backbone[1].running_mean.fill_(2.0)
    module = nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(3, 2)))
    assert Model(lambda: module, trainable="all").frozen == set()
    model = Model.of(module)
    assert (model.parameters, model.buffers) == (("head.weight", "head.bias"), ())
    kept = model.module.state_dict()
    assert all(torch.equal(kept[f"backbone.{name}"], value) for name, value in backbone.state_dict().items())


def test_nothing_trainable_is_an_error() -> None:
    with pytest.raises(ModelError, match="all are frozen"):
        Model(Rotary, trainable="none")


def places_of(shape: torch.Size) -> set[int]:
    """Where tensors of a shape lie in memory."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.shape == shape]
    return {t.data_ptr() for t in found if t.device.type == "cpu"}


@pytest.mark.slow
def test_the_backbone_is_held_once(federation: Federation) -> None:
    """No tensor of the size of a frozen one exists twice, after training and evaluating in both engines."""
    shape = torch.Size((8 * NARROW, 8 * NARROW, 3, 3))
    before = places_of(shape)
    net = network(width=NARROW)
    for engine in ENGINES:
        sim = simulation(federation, "ditto", engine, net)
        sim.step()
        for _ in sim.personal_models((0, 1, 2)):
            pass
    del sim
    held = sum(t.shape == shape for t in frozen_tensors(net).values())
    assert held == 3
    assert len(places_of(shape) - before) == held


def test_features_are_what_goes_into_the_head() -> None:
    net = Model(lambda: build("mlp", (1, 8, 8), 10, hidden=(6,)))
    state, x = net.init(0), torch.randn(4, 1, 8, 8)
    outputs, features = net.outputs_and_features(state, x)
    assert torch.equal(outputs, net(state, x))
    assert features.shape == (4, 6)
    torch.testing.assert_close(F.linear(features, state["head.weight"], state["head.bias"]), outputs)
    mapped = torch.func.vmap(net.outputs_and_features, in_dims=(0, None))(
        torch.stack([state, net.init(1)]), x
    )
    torch.testing.assert_close(mapped[1][0], features)


def test_of_a_sequence_the_last_position_is_the_feature() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.score = nn.Linear(3, 5), nn.Linear(5, 2)

        feature_layer = "score"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.score(self.inner(x)).mean(1)
            return out

    net = Model(Sequence)
    state, x = net.init(0), torch.randn(2, 7, 3)
    _, features = net.outputs_and_features(state, x)
    torch.testing.assert_close(features, F.linear(x[:, -1], state["inner.weight"], state["inner.bias"]))


def test_a_module_resets_what_is_inside_it_last() -> None:
    """A bottleneck adapter draws its linear layers smaller than these do."""
    state = Model.of(BottleneckAdapter(200)).init(5)
    assert not state["up.bias"].any()
    assert float(state["up.weight"].std()) == pytest.approx(0.01, rel=0.05)


def test_bound_lends_the_values_and_takes_them_back() -> None:
    net = Model(Rotary)
    x = torch.randn(5, 3)
    with net.bound(net.init(1)) as module:
        assert torch.equal(module(x), net(net.init(1), x))
        assert not module.training
    assert net._eval.module.linear.weight.device.type == "meta"
