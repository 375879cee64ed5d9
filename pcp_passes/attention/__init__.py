# SPDX-License-Identifier: Apache-2.0
"""Attention of rows that sit anywhere in the sequence: ``pcp::attend`` and its explicit-mask reference."""

from pcp_passes.attention.op import ATTEND, attend, attend_op
from pcp_passes.attention.reference import attend_reference

__all__ = ["ATTEND", "attend", "attend_op", "attend_reference"]
