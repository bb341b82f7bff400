#!/usr/bin/env bash
# torch 2.13: the gradient of a batch norm is wrong for a single image whose memory is that of an HWC array. The image
# is one that `torch.from_numpy(hwc).permute(2, 0, 1)[None]` gives. Its stride over samples is C in place of H * W * C,
# which is harmless for one sample. The output is right and the gradient is not. The same values in NCHW order, or
# brought to torch.channels_last, have the right gradient. Nothing is raised or warned of.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 numpy==2.4.6
program <<'PY'
import torch
import torch.nn.functional as F

hwc = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.manual_seed(0))
weights = torch.randn(1, 3, 4, 5, dtype=torch.float64)


def gradient(images):
    images = images.detach().requires_grad_()
    normed = F.batch_norm(images, None, None, training=True)
    (normed * weights[: len(images)]).sum().backward()
    return normed, images.grad


image = hwc.permute(2, 0, 1)[None]
values, right = gradient(image.contiguous())
for name, form in {
    "NCHW": image.contiguous(),
    "channels_last": image.contiguous().clone(memory_format=torch.channels_last),
    "HWC array, permuted and [None]": image,
}.items():
    normed, grad = gradient(form)
    is_cl = form.is_contiguous(memory_format=torch.channels_last)
    print(f"{name}: strides {form.stride()}, channels_last {is_cl}")
    print(f"  output right: {torch.allclose(normed, values)}, gradient right: {torch.allclose(grad, right)}")
checked = image.contiguous().requires_grad_()
numeric = torch.autograd.gradcheck(lambda x: F.batch_norm(x, None, None, training=True), checked)
print("NCHW against finite differences:", numeric)
PY
expected <<'OUT'
NCHW: strides (60, 20, 5, 1), channels_last False
  output right: True, gradient right: True
channels_last: strides (60, 1, 15, 3), channels_last True
  output right: True, gradient right: True
HWC array, permuted and [None]: strides (3, 1, 15, 3), channels_last True
  output right: True, gradient right: False
NCHW against finite differences: True
OUT
