"""Clusters of neurons that fire together: groups, and not pairs alone.

    firing_clusters(run, layer)   a row a cluster: its neurons, how often they fire together, on how many tokens

Average linkage over 1 - phi, phi being the correlation of two neurons' firings over the unflagged tokens of the sample
(--fired), cut where the mean phi of two clusters is below `least`, or below what one of so many independent pairs
reaches by chance: in 100 tokens some of 100 000 reach 0.45. What it says: a layer of independent neurons has clusters
of one; large ones could be stored, fetched or pruned as one. Cost: 1 s for 1 000 neurons.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from scipy.special import ndtri

from twell.analysis.neurons.coactivation import counted_firings, sampled_layers
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run
from twell.workbench.run.tables.absent import ABSENT

BUSIEST = 1000  # neurons that are clustered, at most
CHANCE = 0.05  # that any pair of independent neurons is joined


def firing_clusters(run: Run, layer: int | None = None, least: float = 0.3, min_fires: int = 20) -> pd.DataFrame:
    """Return clusters of two neurons or more, the largest first, of a layer or of each that was sampled. Columns:

    layer; cluster (from 0); neurons (how many); phi (mean correlation of its pairs); fires (mean tokens of the sample
    that fire one of its neurons); together (share of the tokens that fire any of them that fire more than half: of two,
    both); members (the neurons, one after the other). attrs: alone (neurons in no cluster, by layer). Of each layer the
    1 000 neurons that fire most, at least `min_fires` times in the sample, are clustered; least: the mean phi from
    which clusters are joined, if chance does not reach it in a sample of so few tokens.

    Missing where the run keeps no `fired`; UserError for a `least` that is no correlation above 0.
    """
    if not 0 < least < 1:
        raise UserError(f"Expected a correlation between 0 and 1 to join clusters from, got {least}.")
    if not run.has("fired"):
        raise Missing(f"{run.name} keeps no firings by which to compare all neurons: {ABSENT['fired'][1]}.")
    layers = sampled_layers(run) if layer is None else [layer]
    rows, alone = [], {}
    for each in layers:
        clusters, alone[each] = _clusters(run, each, least, min_fires)
        rows += clusters
    names = ["layer", "cluster", "neurons", "phi", "fires", "together", "members"]
    frame = pd.DataFrame(rows, columns=names)
    frame.attrs = {"definition": run.manifest.nnz_definition, "alone": alone}
    frame.attrs["note"] = (
        f"joined from a mean correlation of {least:g}, or from what chance alone reaches among so many pairs; in the "
        "unflagged tokens of the sample of firings"
    )
    return frame


def _clusters(run: Run, layer: int, least: float, min_fires: int) -> tuple[list[dict[str, object]], int]:
    """Return the rows of one layer, and how many of its neurons are in no cluster."""
    fired = counted_firings(run, layer, np.float64)
    fires = np.asarray(fired.sum(axis=0)).ravel()
    busy = np.argsort(-fires, kind="stable")[:BUSIEST]
    busy = np.sort(busy[(fires[busy] >= min_fires) & (fires[busy] < fired.shape[0])])
    if len(busy) < 2:
        return [], len(busy)
    chosen, n = fired[:, busy], fired.shape[0]
    count = fires[busy]
    spread = np.sqrt(count * (n - count))
    phi = (n * (chosen.T @ chosen).toarray() - np.outer(count, count)) / np.outer(spread, spread)
    np.fill_diagonal(phi, 1.0)
    distance = np.clip(1 - (phi + phi.T) / 2, 0, 2)
    np.fill_diagonal(distance, 0)
    reached = -ndtri(CHANCE / (len(busy) * (len(busy) - 1) / 2)) / np.sqrt(n)  # phi of independent neurons: sd 1/√n
    cut = 1 - min(max(least, reached), 1)
    label = fcluster(linkage(squareform(distance, checks=False), "average"), cut, "distance")
    rows: list[dict[str, object]] = []
    sizes = np.bincount(label)
    for number in np.argsort(-sizes, kind="stable"):
        inside = np.flatnonzero(label == number)
        if len(inside) < 2:
            continue
        active = np.asarray(chosen[:, inside].sum(axis=1)).ravel()
        pairs = phi[np.ix_(inside, inside)][np.triu_indices(len(inside), 1)]
        columns = {"layer": layer, "cluster": len(rows), "neurons": len(inside), "phi": float(pairs.mean())}
        columns |= {"fires": float(count[inside].mean())}
        columns |= {"together": float((active > len(inside) / 2).sum() / (active > 0).sum())}
        rows.append({**columns, "members": " ".join(map(str, busy[inside]))})
    return rows, int((sizes == 1).sum())
