# SPDX-License-Identifier: Apache-2.0
"""Parts of ``bucket_padding.py``: request traces, and the steps that a scheduler packs from them."""
