"""One rank of a training run, with what tests measure of it."""

from layouts import make_rows, micro_batch

from megatron5d.comm.ledger import Ledger
from megatron5d.config.schema import Config
from megatron5d.data.sample_order import micro_batch_samples
from megatron5d.model.gpt import GPT
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout


class TrainingRank:
    """The model, its trainer and one step's micro-batches."""

    def __init__(self, config: Config, rank: int = 0, world: int = 1) -> None:
        self.ledger = Ledger()
        mesh = build_mesh(sizes_of(config, world), rank, recorder=self.ledger)
        plan = pipeline_layout(config, world)
        self.model = GPT(config, mesh, "cpu", plan.stage_specs(0), plan.shared)
        self.model.initialize(1)
        self.sync, _, self.trainer = build_trainer(config, mesh, self.model, plan)
        rows, train = make_rows(config, 1), config.train
        samples = micro_batch_samples(0, train.gbs, train.mbs, mesh["dp"].rank, mesh["dp"].size)
        self.batches = [micro_batch(config, rows[list(indices)]) for indices in samples]

    def step(self):
        self.ledger.clear()
        return self.trainer.step(self.batches, 1e-2)

    def evaluate(self):
        return self.trainer.evaluate(self.batches)

    def weights(self):
        """Copies of the gathered weights, as numpy arrays."""
        with self.sync.weights.gathered():
            return [p.detach().float().numpy().copy() for p in self.model.parameters()]
