"""An evolution strategy over real vectors: CMA-ES, which learns the scale and the correlations of good steps.

Source: Hansen 2016, The CMA Evolution Strategy: A Tutorial (1604.00772), §B, without its negative weights.
"""

import numpy as np

EIGEN_EVERY = 10
"""Generations between two decompositions of the covariance; in between it hardly changes."""


class Evolution:
    """Asks for candidates around a mean and moves towards the better ones.

    Args:
        mean: `[n]` where the search starts.
        step: standard deviation of the first candidates in every dim.
        rng: the only source of chance.
    """

    def __init__(self, mean: np.ndarray, step: float, rng: np.random.Generator) -> None:
        n = len(mean)
        self.mean, self.step, self.rng = mean.astype(float), step, rng
        self.population = 4 + int(3 * np.log(n))
        parents = self.population // 2
        weights = np.log(self.population / 2 + 0.5) - np.log(np.arange(1, parents + 1))
        self.weights = weights / weights.sum()
        mass = self._mass = 1 / (self.weights**2).sum()
        self._path_rate = (4 + mass / n) / (n + 4 + 2 * mass / n)
        self._step_rate = (mass + 2) / (n + mass + 5)
        self._rank_one = 2 / ((n + 1.3) ** 2 + mass)
        self._rank_many = min(1 - self._rank_one, 2 * (mass - 2 + 1 / mass) / ((n + 2) ** 2 + mass))
        self._damping = 1 + 2 * max(0.0, np.sqrt((mass - 1) / (n + 1)) - 1) + self._step_rate
        self._expected = np.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))
        self._path, self._step_path = np.zeros(n), np.zeros(n)
        self._covariance, self._axes, self._lengths = np.eye(n), np.eye(n), np.ones(n)
        self._generation = 0
        self._normal = self._moves = np.zeros((0, n))

    def ask(self) -> np.ndarray:
        """Returns `[population, n]` the candidates of the next generation."""
        self._normal = self.rng.standard_normal((self.population, len(self.mean)))
        self._moves = (self._normal * self._lengths) @ self._axes.T
        return self.mean + self.step * self._moves

    def tell(self, costs: np.ndarray) -> None:
        """Learns `[population]` what the candidates of the last `ask` cost; only their order counts."""
        order = np.argsort(costs, kind="stable")[: len(self.weights)]
        moves = self._moves[order]
        move = self.weights @ moves
        self.mean = self.mean + self.step * move
        self._generation += 1
        rate, n = self._step_rate, len(self.mean)
        along = self._axes @ (self.weights @ self._normal[order])
        self._step_path = (1 - rate) * self._step_path + np.sqrt(rate * (2 - rate) * self._mass) * along
        length = np.linalg.norm(self._step_path)
        expected = self._expected * np.sqrt(1 - (1 - rate) ** (2 * self._generation))
        steady = float(length / expected < 1.4 + 2 / (n + 1))
        rate = self._path_rate
        self._path = (1 - rate) * self._path + steady * np.sqrt(rate * (2 - rate) * self._mass) * move
        one, many = self._rank_one, self._rank_many
        missing = one * (1 - steady) * rate * (2 - rate)
        self._covariance *= 1 - one - many + missing
        self._covariance += one * np.outer(self._path, self._path) + many * (moves.T * self.weights) @ moves
        self.step *= float(np.exp(self._step_rate / self._damping * (length / self._expected - 1)))
        if self._generation % EIGEN_EVERY == 0:
            values, self._axes = np.linalg.eigh((self._covariance + self._covariance.T) / 2)
            self._lengths = np.sqrt(np.maximum(values, 1e-12))
