"""A head's figures, from a bench to its folder.

    eyas bench --target smollm2 --workload mt_bench --workload gsm8k --method my-head --json > bench.json
    python benchmarks/figures.py bench.json my-head

Takes the greedy rows of the bench's only head, and of those that drafted in every round (`--no-guard`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyas.promise import Figures, write_figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    rows = json.loads(arguments.bench.read_text())["rows"]
    rows = [row for row in rows if row["head"] and row["temperature"] == 0 and row["alpha_by_depth"]]
    rows = [row for row in rows if not row["plain_forwards"]]
    heads = {row["head"] for row in rows}
    if len(heads) != 1:
        raise SystemExit(f"the bench must be of one head, got {', '.join(sorted(heads)) or 'none'}")
    write_figures(
        arguments.folder,
        [Figures(row["tree"], row["workload"], round(row["tau"], 3), _rounded(row["alpha_by_depth"])) for row in rows],
    )
    print(json.dumps({"rows": len(rows), "out": str(arguments.folder)}))


def _rounded(shares: list[float]) -> tuple[float, ...]:
    return tuple(round(share, 3) for share in shares)


if __name__ == "__main__":
    main()
