# SPDX-License-Identifier: Apache-2.0
"""vLLM front end: a plugin, two compile backends and a batch manager. The only sub-package that imports vllm."""
