# SPDX-License-Identifier: Apache-2.0
"""Parts of ``piecewise_graphs_gpu.py``: models without transformers, engine runs with and without graphs, two ranks."""
