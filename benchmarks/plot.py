"""One picture per run: a bar for each row of each scenario, on a logarithmic scale."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import Results, number
from benchmarks.timing import median

__all__ = ["draw"]

_COLOURS = {"ceiling": "#9e9e9e", "tensorcache": "#d1495b", "lazy": "#d1495b"}
_PEERS = "#30638e"


def draw(path: Path, results: Results) -> None:
    """Draw medians: a column for each workload, a row for each scenario, bars sorted, faster above.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    scenarios = list(dict.fromkeys(scenario for found in results.values() for scenario in found))
    heights = [max(len(found.get(scenario, ())) for found in results.values()) + 1.5 for scenario in scenarios]
    figure, axes = plt.subplots(
        len(scenarios),
        len(results),
        figsize=(6.5 * len(results), 0.19 * sum(heights) + 1),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for row, scenario in enumerate(scenarios):
        for column, (workload, found) in enumerate(results.items()):
            panel = axes[row][column]
            if not found.get(scenario):
                panel.axis("off")
                continue
            medians = sorted(((median(found[scenario], name), name) for name in found[scenario]), reverse=True)
            colours = [_COLOURS.get(name.split(",")[0].split(" ")[0], _PEERS) for _, name in medians]
            bars = panel.barh([name for _, name in medians], [value for value, _ in medians], color=colours)
            panel.bar_label(bars, [number(value) for value, _ in medians], padding=2, fontsize=6)
            panel.set_xscale("log")
            panel.set_xlim(medians[-1][0] / 2, medians[0][0] * 2)
            panel.xaxis.set_visible(False)  # the bars are labelled
            panel.tick_params(labelsize=6)
            panel.set_title(f"{scenario}, {workload}: us/{'store' if scenario == 'open' else 'sample'}", fontsize=8)
            panel.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
