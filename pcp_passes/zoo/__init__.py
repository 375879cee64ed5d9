# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers, and the check that sharding leaves their logits alone: ``pcp zoo``.

* :mod:`~pcp_passes.zoo.models` builds them, :mod:`~pcp_passes.zoo.shrink` finds small configurations for any type;
* :mod:`~pcp_passes.zoo.check` compares a sharded run with the model, and makes sure that a wrong run would be seen;
* :mod:`~pcp_passes.zoo.sharded` runs models on simulated ranks and counts what that cost;
* :mod:`~pcp_passes.zoo.row` is all of that for one type, :mod:`~pcp_passes.zoo.children` runs each in its own process.

Needs transformers, which the rest of the package does not. Nothing is imported here, so that children can be started
before PyTorch is.
"""
