# SPDX-License-Identifier: Apache-2.0
"""The embedded reference engine: paged KV, continuous batching, chunked prefill, speculative decoding, on P ranks.

Read in this order: ``options``, ``request``, ``blocks``, ``scheduler`` (host), ``state`` (device), ``executor`` and
``ranks``, ``engine``. Import from the modules; ``bodies`` captures models for it.
"""
