"""Embeddings of the nodes of a graph that grows while they train: random walks and negative sampling, as in DeepWalk.

Half of the nodes come half way, and no list of nodes is made before: a node has a row once a walk has met it. Rows for
which `--memory` (bytes) has no room lie on disk. The graph is planted, so the best AUC of link prediction is known.

    python examples/node_embeddings.py
    python examples/node_embeddings.py --nodes 10_000_000 --dim 128 --memory 3_000_000_000
"""

import argparse
import resource
import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

import recstore_ops
from recstore_ops import KeyedJaggedTensor, PrefetchingDataLoader, SparseOptimizer, cross_ids, table_statistics
from recstore_ops.training import auc

WALKS, LENGTH, NEGATIVES, LINKS, TESTED, EPOCHS = 1024, 4, 256, 10, 20_000, 15


class Graph:
    """Of ten links of a node about seven go to its village of 200 nodes, two to its region of 2,000, one anywhere."""

    def __init__(self, nodes: int) -> None:
        self.nodes, self.half, regions = nodes, nodes // 2, max(1, nodes // 2000)
        # Nodes that are equal modulo the first are of one village, modulo the last but one of one region.
        self.moduli = torch.tensor([10 * regions] * 7 + [regions] * 2 + [1])

    def size(self, nodes: Tensor) -> Tensor:  # Of the graph as these nodes had come: they link to no others.
        return torch.where(nodes < self.half, self.half, self.nodes)

    def links(self, nodes: Tensor, numbers: Tensor) -> Tensor:
        """The other ends of links. They are a function of node and number, so a graph of any size takes no memory."""
        modulus = self.moduli[cross_ids([nodes, numbers]) % len(self.moduli)]
        return nodes % modulus + modulus * (cross_ids([nodes, numbers], seed=1) % (self.size(nodes) // modulus))

    def likelihood(self, nodes: Tensor, others: Tensor) -> Tensor:
        """How much more often a link joins two nodes than chance does: no score finds links better."""
        return ((nodes[:, None] % self.moduli == others[:, None] % self.moduli) * self.moduli).double().mean(1)

    def batches(self, first: int, end: int, count: int) -> Iterator[KeyedJaggedTensor]:
        """Nodes of walks, [WALKS * LENGTH], that start from `first` to below `end`, and negatives, [NEGATIVES]."""
        for _ in range(count):
            walk = [torch.randint(first, end, (WALKS,))]
            while len(walk) < LENGTH:
                walk.append(self.links(walk[-1], torch.randint(LINKS, (WALKS,))))
            # Every int64 is an id: these are hashes, as of names. Each is a bag of its own.
            ids = cross_ids([torch.cat([torch.stack(walk, 1).flatten(), torch.randint(end, (NEGATIVES,))])])
            yield KeyedJaggedTensor(["node"], ids, lengths=torch.ones_like(ids))


def skip_gram_loss(rows: Tensor) -> Tensor:
    """Nodes of a walk are near each other, and far from the negatives."""
    walks, (first, second) = rows[:-NEGATIVES].view(WALKS, LENGTH, -1), torch.triu_indices(LENGTH, LENGTH, 1)
    near, far = (walks @ walks.mT)[:, first, second], walks @ rows[-NEGATIVES:].T
    return near.numel() * (softplus(-near).mean() + 2 * softplus(far).mean())


def link_prediction(graph: Graph, rows: recstore_ops.DistTensor, first: int, end: int) -> list[float]:
    """AUC of the embeddings and of the likelihood: links that no walk takes, among as many pairs by chance."""
    starts = torch.randint(first, end, (TESTED,))
    by_chance = torch.randint(2**62, (TESTED,)) % graph.size(starts)
    nodes, others = starts.repeat(2), torch.cat([graph.links(starts, torch.full_like(starts, LINKS)), by_chance])
    scores = cosine_similarity(rows[cross_ids([nodes])], rows[cross_ids([others])])
    return [auc(torch.arange(2 * TESTED) < TESTED, each) for each in (scores, graph.likelihood(nodes, others))]


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, default in {"nodes": 20_000, "dim": 64, "memory": 4_000_000, "epochs": EPOCHS}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    graph, count = Graph(options.nodes), options.epochs * options.nodes // (6 * WALKS * LENGTH)
    table = {"name": "node", "num_embeddings": None, "embedding_dim": options.dim, "memory_limit": options.memory}
    rule = {"kind": "rowwise_adagrad", "lr": 0.3}
    bags = recstore_ops.RecStoreEmbeddingBagCollection([table], optimizer=rule, disk=tempfile.gettempdir())
    optimizer, rows = SparseOptimizer(modules=[bags]), bags.embedding_bags["node"].weight
    old, new = (0, graph.half), (graph.half, graph.nodes)
    figures = [0.0] * 4
    print("      rows   in memory    on disk   GiB of process   AUC of first half, best   of second, best")
    for first, end in [old] * 3 + [new] * 6:
        for batch in PrefetchingDataLoader(graph.batches(first, end, count), bags):
            skip_gram_loss(bags(batch).squeeze(1)).backward()
            optimizer.step()
        figures = [*link_prediction(graph, rows, *old), *link_prediction(graph, rows, *new)]
        found, most = table_statistics("node"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        counts = f"{found['rows']:10}   {found['resident_rows']:9}   {found['rows'] - found['resident_rows']:8}"
        print(f"{counts}   {most:14.2f}       " + "   ".join(f"{figure:.4f}" for figure in figures))
    assert options.epochs < EPOCHS or max(figures[1] - figures[0], figures[3] - figures[2]) < 0.01


if __name__ == "__main__":
    main()
