# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of token graphs: selected keys (:mod:`.ops`), and who attends over them (:mod:`.backends`)."""
