# SPDX-License-Identifier: Apache-2.0
"""Parts of ``sparse_index_gpu.py``: checked calls of every shipped kernel, and their speeds."""
