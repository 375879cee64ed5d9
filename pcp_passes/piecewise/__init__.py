# SPDX-License-Identifier: Apache-2.0
"""Piecewise CUDA graphs: bodies cut into pieces that can be captured, and what runs them at fixed addresses."""
