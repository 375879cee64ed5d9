# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention in vLLM on CPU, where vLLM itself refuses it.

vLLM's generic model classes (``deepseek_v2.py``, ``deepseek_mtp.py``) are compiled, but on CPU nothing executes their
sparse layers. Three things are put in their places, all through vLLM's own extension points:

* :mod:`.layer` is an out-of-tree latent attention layer whose key selection is a value of the graph: an indexer layer
  makes it, its own attention and the layers that share it take it as an operand. vLLM connects them by a buffer that an
  op writes and another reads behind the graph's back;
* :mod:`.backend` gives the layers their caches, and builds what attention needs to know of a step;
* :mod:`.ops` are the four ops in the graph. The rules of ``gather-cache-writes`` and of the invariants know them
  (:mod:`.rules`), so under PCP index keys are gathered as latents are, rank after rank, by an explicit layout tag.

Results follow the selection contract of ``pcp_kernels``: equal scores are taken in position order, so neither batching
nor sharding changes a selection.
"""
