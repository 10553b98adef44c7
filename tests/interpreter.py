"""Triton's interpreter, which runs kernels on the CPU: for machines without a GPU. Import before any kernel."""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
    try:
        from triton.runtime import interpreter
    except ImportError:
        pass
    else:
        patch = interpreter._patch_lang_tensor

        def patch_lang_tensor(tensor: Any, scope: Any) -> None:
            patch(tensor, scope)
            # Triton 3.6 takes int() of an array of one number, which NumPy 2.4 no longer does.
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch_lang_tensor
