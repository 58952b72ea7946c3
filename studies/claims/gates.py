"""What must be so before a comparison counts: else the claim is "not tested", whatever the difference.

| gate | passes if |
|---|---|
| learned | every line of the claim lies 15 points or more above chance; FedAvg too, and 10 or more below the ceiling |
| took part | clients took part 10 times or more in the mean, and none fewer than 5 times |
| trained | Local's validation (else test) curve moves less than a point in the last fifth of the rounds |
| pulled | η·λ·steps of methods with λ is 3 or more a participation, or 10 or more in all |
| settled | no mean moves by a point in the last fifth of the rounds, nor the verdict's side if all curves go on so |
| inside grid | settings were tuned, and no chosen value lies at the edge of its grid |
| faithful | network family, split, participations, head and λ are what the claim's `setting` asks for |

What was not recorded does not pass. Where nothing but `faithful` fails, the claim is "not tested at this scale", and
what the run shows stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from studies.claims.claim import Claim, Floor, Gate, Paper, Setting
from studies.claims.evidence import Evidence
from studies.claims.verdicts import POINT
from tailorfl.evaluation.comparisons import interval

ABOVE_CHANCE, BELOW_CEILING = 0.15, 0.10
MEAN_TURNS, LEAST_TURNS = 10, 5
PULL_EACH, PULL_ALL = 3.0, 10.0
FALLEN = 0.1
"""Of the first learning rate at most, in the last round."""
SIDES = {"holds": 1, "holds in sign": 1, "does not hold": -1, "reversed": -1}


@dataclass(frozen=True)
class _Look:
    """What a gate looks at."""

    claim: Claim
    floor: Floor
    setting: Setting
    evidence: Evidence
    places: tuple[tuple[str, str], ...]  # (label, variant) of the claim's methods
    verdicts: tuple[str, str, str]  # as found, after every curve moved on, and before the last fifth

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(variant for _, variant in self.places))

    def means(self, name: str, places: Iterable[tuple[str, str]]) -> list[float]:
        """Mean over seeds of a number, of each place that has it."""
        found = [list(self.evidence.of(label, variant, name).values()) for label, variant in places]
        return [interval(values)[0] for values in found if values]


def failed(
    claim: Claim,
    paper: Paper,
    evidence: Evidence,
    places: Iterable[tuple[str, str]],
    verdicts: tuple[str, str, str],
) -> dict[Gate, str]:
    """Return a sentence for every gate that a claim's comparison does not pass.

    `verdicts` are what it is judged to be, what it would be if every curve went on (`Evidence.moved_on`), and what it
    was before the last fifth of the rounds.
    """
    look = _Look(claim, paper.floor, paper.setting_of(claim), evidence, tuple(places), verdicts)
    said = ((gate, _GATES[gate](look)) for gate in paper.gates_of(claim))
    return {gate: problem for gate, problem in said if problem}


def _learned(look: _Look) -> str:
    fedavg = [(look.floor.fedavg, variant) for variant in look.variants if look.floor.fedavg]
    low, high = look.floor.chance + ABOVE_CHANCE, look.floor.ceiling - BELOW_CEILING
    for label, variant in (*fedavg, *look.places):
        found = look.means("mean", [(label, variant)])
        if not found:
            return f"there is no line '{label}'"
        if found[0] < low or ((label, variant) in fedavg and found[0] > high):
            limits = (
                f"lie in [{low:.2f}, {high:.2f}]" if (label, variant) in fedavg else f"be {low:.2f} or more"
            )
            return f"{label} reaches {found[0]:.3f}, which should {limits}"
    return ""


def _took_part(look: _Look) -> str:
    means = look.means("fact.took_part.mean", look.places)
    least = look.means("fact.took_part.least", look.places)
    if not means:
        return "not recorded"
    if min(means) < MEAN_TURNS:
        return f"clients took part {min(means):.1f} times, which should be {MEAN_TURNS}"
    return (
        f"a client took part {min(least):.1f} times, which should be {LEAST_TURNS}"
        if min(least) < LEAST_TURNS
        else ""
    )


def _trained(look: _Look) -> str:
    places = [(look.floor.local, variant) for variant in look.variants]
    found = look.means("fact.change_val", places) or look.means("fact.change", places)
    if not found:
        return f"no curve of '{look.floor.local}' was recorded (eval.every)"
    most = max(map(abs, found))
    return f"Local moved by {most:.3f} in the last fifth of the rounds" if most >= POINT else ""


def _pulled(look: _Look) -> str:
    each, whole = look.means("fact.pull.each", look.places), look.means("fact.pull.all", look.places)
    if not each:
        return "no pull is known"
    weak = [a for a, b in zip(each, whole, strict=True) if a < PULL_EACH and b < PULL_ALL]
    return f"η·λ·steps is {weak[0]:.2g} a participation, which should be {PULL_EACH:g}" if weak else ""


def _settled(look: _Look) -> str:
    if len(look.means("fact.change", look.places)) < len(look.places):
        return "not all curves were recorded (eval.every)"
    moved: dict[str, list[float]] = {}
    for label, variant in look.places:
        moved.setdefault(label, []).append(look.evidence.change(label, variant, look.claim.metric))
    means = {label: abs(sum(found) / len(found)) for label, found in moved.items()}
    label, most = max(means.items(), key=lambda one: one[1])
    left = look.means("fact.rate_left", look.places)
    # Where the rate has fallen, curves move because it falls; then no part of its fall may decide.
    fallen = len(left) == len(look.places) and max(left) <= FALLEN
    if most >= POINT and not fallen:
        return f"{label} moved by {most:.3f} in the last fifth of the rounds, limit {POINT}"
    now, then, before = look.verdicts
    if SIDES.get(now) is not None and SIDES[now] != SIDES.get(then):
        return f"if every curve went on as in the last fifth of the rounds, it would be '{then}'"
    if fallen and most >= POINT and SIDES.get(now) is not None and SIDES[now] != SIDES.get(before):
        return f"before the last fifth of the rounds, in which the rate fell to its end, it was '{before}'"
    return ""


def _inside_grid(look: _Look) -> str:
    found = look.means("fact.inside_grid", look.places)
    if len(found) < len(look.places):
        return "not tuned"
    return "a tuned value lies at the edge of its grid" if min(found) < 1 else ""


def _faithful(look: _Look) -> str:
    asked, problems = look.setting, list[str]()
    for variant in look.variants:
        run = look.evidence.settings.get(variant)
        if run is None:
            return "the settings of the run were not kept"
        if asked.network and run["network"] not in asked.network:
            problems.append(f"the network is {run['network']}, not {' or '.join(asked.network)}")
        if asked.split and not any(set(split.split()) <= set(run["split"].split()) for split in asked.split):
            problems.append(f"the split is {run['split']}, not {' or '.join(asked.split)}")
        if asked.head and run["head"] != asked.head:
            problems.append(f"the head is {run['head']}, not {asked.head}")
    turns = look.means("fact.took_part.mean", look.places)
    if asked.turns and min(turns, default=0) < asked.turns:
        problems.append(f"clients take part {min(turns, default=0):.0f} times, not {asked.turns:.0f}")
    chosen = 1.0 in look.means("fact.lam_chosen", look.places)
    if asked.lam and chosen != (asked.lam == "chosen"):
        problems.append(f"λ is {'chosen' if chosen else 'pinned'}, not {asked.lam}")
    return ", ".join(dict.fromkeys(problems))


_GATES: dict[Gate, Callable[[_Look], str]] = {
    "learned": _learned,
    "took part": _took_part,
    "trained": _trained,
    "pulled": _pulled,
    "settled": _settled,
    "inside grid": _inside_grid,
    "faithful": _faithful,
}
