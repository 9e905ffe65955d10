"""Least squares with coefficients that must not be negative."""

import numpy as np


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """
    Return the x >= 0 that minimises |matrix @ x - target| (Lawson and Hanson's active-set method).

    Args:
        matrix (`np.ndarray` of shape `[n, k]`), target (`[n]`): float64. Columns may differ in scale by any factor.

    Returns:
        `np.ndarray` of shape `[k]`, float64: The coefficients x.
    """
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    matrix = matrix / scale
    solution, passive = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    for _ in range(10 * len(solution)):
        gradient = np.where(passive | (norms == 0), -np.inf, matrix.T @ (target - matrix @ solution))
        if gradient.max() <= 1e-10 * np.linalg.norm(target):
            break
        passive[gradient.argmax()] = True
        while (trial := _solve(matrix, target, passive))[passive].min() <= 0:
            # Go towards the trial solution as far as it is feasible; coefficients that reach 0 become inactive.
            blocked = passive & (trial <= 0)
            step = (solution[blocked] / (solution[blocked] - trial[blocked])).min()
            solution = solution + step * (trial - solution)
            passive &= solution > 1e-14
            if not passive.any():
                break
        solution = trial
    return solution / scale


def _solve(matrix: np.ndarray, target: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the plain least-squares solution for some columns, with 0 for the others."""
    solution = np.zeros(matrix.shape[1])
    solution[columns] = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
    return solution
