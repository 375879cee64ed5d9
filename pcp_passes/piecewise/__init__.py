# SPDX-License-Identifier: Apache-2.0
"""Piecewise CUDA graphs: bodies cut into pieces that can be captured, and what runs them at fixed addresses.

==============================================  =============================================================
``cuts``, ``stretches``, ``emit``, ``holds``    where a body is cut and why; the pieces; what stays in place
``split``, ``pieces``, ``listing``, ``checks``  the split as a whole; what it is made of; its invariants
``buckets``, ``prepare``, ``compile``           row counts that exist; a program made ready; compiled pieces
``static``, ``runner``                          a rank's buffers; how its body calls run
``replayer``, ``cuda``, ``checker``, ``reads``  capture and replay: interface, GPU, and its stand-in on a CPU
``capturable``, ``sync_check``, ``report``      what no graph can hold; host reads; what inspection prints
==============================================  =============================================================
"""
