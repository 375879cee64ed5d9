# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers, and the check that sharding leaves their logits alone."""
