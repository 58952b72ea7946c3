"""Makes the tables of measurements in README.md and docs/ from benchmarks/results, so that the two cannot disagree.

python docs/benchmark_tables.py            prints the tables
python docs/benchmark_tables.py --write    puts them into the pages
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PERFORMANCE, KERNELS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "kernels.md"
OPERATIONS = ROOT / "benchmarks" / "results" / "kernels.md"
MODELS = {
    "logistic": "logistic regression",
    "mlp": "MLP 784-200-10",
    "cnn2": "CNN2, 421,642 scalars",
}
NETWORKS = {**MODELS, "dense": "dense network of EMNIST"}
METHODS = {"fedavg": "FedAvg", "ditto": "Ditto", "apfl": "APFL"}
PROGRAMS = {"plain": "plain loop", "pfl": "pfl-research", "flower": "Flower", "fedjax": "FedJAX"}


def tables() -> dict[Path, dict[str, str]]:
    """Return the Markdown tables of every page by the name that their place has there."""
    return {
        README: {"frameworks": frameworks(read("frameworks"), 100)},
        PERFORMANCE: {
            "local_training": training(read("local_training")),
            "local_training, AVX2": training(read("avx2/local_training")),
            "all frameworks": frameworks(read("frameworks")),
            "many_clients": clients(read("many_clients")),
            "lora_memory": adapters(read("lora_memory")),
        },
        **kernels(read("kernels")),
    }


def kernels(results: dict[str, Any]) -> dict[Path, dict[str, str]]:
    """Return the tables of kernels: of rounds and limits in the documents, of single operations beside the results."""
    made = {title: plain(table) for title, table in results.items() if isinstance(table, list)}
    pages = {page: page.read_text(encoding="utf-8") for page in (KERNELS, OPERATIONS)}
    parts = {
        page: {title: table for title, table in made.items() if f"<!-- {title}: made by" in text}
        for page, text in pages.items()
    }
    lost = made.keys() - parts[KERNELS].keys() - parts[OPERATIONS].keys()
    assert not lost, f"no page has a place for the tables {lost}"
    return parts


def read(name: str) -> dict[str, Any]:
    """Return the results of a benchmark."""
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    )
    return found


def training(results: dict[str, Any]) -> str:
    """Return seconds a round, and in brackets how many times faster than the plain loop."""
    lines = [
        "| Model | Plain loop | `sequential` | `vectorized` | `auto` |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, title in MODELS.items():
        seconds, times = results[name]["seconds"], results[name]["times_faster_than_plain"]
        cells = [f"{seconds[e]:.3g} s ({times[e]:.2f} ×)" for e in ("sequential", "vectorized", "auto")]
        lines.append(f"| {title} | {seconds['plain']:.3g} s | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def frameworks(results: dict[str, Any], clients: int | None = None) -> str:
    """Return the seconds of a round, and in other programs how many times as long it takes; with so many clients."""
    lines = [line for line in results["lines"] if clients in (None, line["case"]["clients"])]
    versions = {
        name: row["version"] for line in lines for name, row in line["programs"].items() if "version" in row
    }
    heads = ["Method", "Model", *(["Clients"] if clients is None else ())]
    table = [[*heads, *(f"{PROGRAMS.get(name, name)}{_version(name, versions)}" for name in versions)]]
    table.append(["---", "---", *["---:"] * (len(table[0]) - 2)])
    for line in lines:
        case, seconds = line["case"], line["programs"]["tailorfl"]["cpu_seconds"]
        row = [METHODS[case["method"]], NETWORKS[case["model"]].split(",")[0]]
        row += [f"{case['clients']:,}"] if clients is None else []
        for name in versions:
            measured = line["programs"].get(name, {})
            if name == "tailorfl":
                row.append(f"{seconds:.3g} s")
            elif "cpu_seconds" in measured:
                row.append(f"{measured['cpu_seconds'] / seconds:.3g} ×")
            else:
                row.append("fails" if "failed" in measured else "> 180 s" if measured else "")
        table.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def _version(name: str, versions: dict[str, str]) -> str:
    return "" if name in ("tailorfl", "plain") else f" {versions[name]}"


def clients(results: dict[str, Any]) -> str:
    """Return what registered and sampled clients cost."""
    head = ["Clients", "Sampled a round", "Seconds a round", "Start-up, seconds", "Peak memory"]
    lines = [f"| {' | '.join(head)} |", "|" + " ---: |" * len(head)]
    for line in results["lines"]:
        lines.append(
            f"| {line['registered']:,} | {line['cohort']:,} | {line['round_seconds']:.3f} "
            f"| {line['start_up_seconds']:.2g} | {line['peak_bytes'] / 1e6:,.0f} MB |"
        )
    return "\n".join(lines) + "\n"


def adapters(results: dict[str, Any]) -> str:
    """Return memory and seconds of many clients' adapters on one transformer."""
    rows = results["rows"]
    loop = next(row["seconds"] for row in rows if row["way"] == "plain loop")
    lines = ["| | Clients | Peak memory | Seconds a round | Of the plain loop |", "| --- |" + " ---: |" * 4]
    for row in rows:
        share = f"{row['seconds'] / loop:.2f} ×" if row["clients"] > 1 else ""
        cells = f"{row['clients']:,} | {row['peak_mb']:,.0f} MB | {row['seconds']:.2f} | {share}"
        lines.append(f"| {row['way']} | {cells} |")
    return "\n".join(lines) + "\n"


def plain(rows: list[dict[str, Any]]) -> str:
    """Return a table as it was measured, numbers with three digits."""
    heads = list(rows[0])
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for row in rows:
        cells = (f"{row[h]:.3g}" if isinstance(row[h], float) else str(row[h]) for h in heads)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def insert(page: str, made: dict[str, str]) -> str:
    """Return the page with its tables replaced by those of the results."""
    for name, table in made.items():
        begin, end = f"<!-- {name}: made by docs/benchmark_tables.py -->\n", f"<!-- end of {name} -->\n"
        assert begin in page, f"the page has lost the line {begin!r}"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    """Print the tables, or write them into the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put them into the pages")
    write = parser.parse_args().write
    for page, made in tables().items():
        if write:
            page.write_text(insert(page.read_text(encoding="utf-8"), made), encoding="utf-8")
        else:
            print("\n".join(made.values()))


if __name__ == "__main__":
    main()
