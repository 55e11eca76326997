"""A load for a GPU whose effect is known beforehand: libcuda by ctypes, kernels as PTX text, no toolkit.

Run: python bench/device/cuda_load.py --kind fma --share 0.5 --seconds 5
It prints a JSON object a line: `ready` once the GPU works, `done` with what it did; `none` where there is no CUDA.

- fma: `share` of the SMs run chains of FP32 fused multiply-adds; every other SM has nothing.
- tensor: the same with FP16 matrix multiply-adds (compute capability 8.0 and newer).
- stream: all SMs read a buffer that no cache holds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

THREADS = 1024  # of a block; fills half of an SM's warp slots on Hopper, so that a block has an SM for itself
KINDS = ("fma", "tensor", "stream")

# Four independent accumulators a thread hide the latency of a multiply-add. What they come to is stored only if it is a
# number that it can't be, which the compiler does not know.
_CHAIN = "".join(f"    fma.rn.f32 %f{at}, %f{at}, %f5, %f6;\n" for at in (1, 2, 3, 4)) * 8
FMA_OPERATIONS = 2 * 4 * 8  # of a thread in a round
FMA_ROUNDS = 200_000

FMA = f"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry fma(.param .u64 out, .param .u32 rounds)
{{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .f32 %f<8>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd2, %rd1;
    ld.param.u32 %r1, [rounds];
    mov.u32 %r2, %tid.x;
    cvt.rn.f32.u32 %f1, %r2;
    add.f32 %f2, %f1, 0f3F800000;
    add.f32 %f3, %f2, 0f3F800000;
    add.f32 %f4, %f3, 0f3F800000;
    mov.f32 %f5, 0f3F7FBE77;
    mov.f32 %f6, 0f3F000000;
    mov.u32 %r3, 0;
AGAIN:
{_CHAIN}    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, %r1;
    @%p1 bra AGAIN;
    add.f32 %f1, %f1, %f2;
    add.f32 %f3, %f3, %f4;
    add.f32 %f1, %f1, %f3;
    setp.neu.f32 %p1, %f1, 0fFF7FFFFF;
    @%p1 bra END;
    st.global.f32 [%rd2], %f1;
END:
    ret;
}}
"""

STREAM = """
.version 6.4
.target sm_70
.address_size 64

.visible .entry stream(.param .u64 out, .param .u64 data, .param .u64 vectors)
{
    .reg .pred %p<2>;
    .reg .b32 %r<11>;
    .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd1, %rd1;
    ld.param.u64 %rd2, [data];
    cvta.to.global.u64 %rd2, %rd2;
    ld.param.u64 %rd3, [vectors];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    cvt.u64.u32 %rd4, %r1;
    mul.wide.u32 %rd5, %r4, %r2;
    mov.u32 %r5, 0;
    setp.ge.u64 %p1, %rd4, %rd3;
    @%p1 bra STORE;
AGAIN:
    shl.b64 %rd6, %rd4, 4;
    add.u64 %rd7, %rd2, %rd6;
    ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%rd7];
    xor.b32 %r6, %r6, %r7;
    xor.b32 %r8, %r8, %r9;
    xor.b32 %r6, %r6, %r8;
    xor.b32 %r5, %r5, %r6;
    add.u64 %rd4, %rd4, %rd5;
    setp.lt.u64 %p1, %rd4, %rd3;
    @%p1 bra AGAIN;
STORE:
    setp.ne.u32 %p1, %r5, 0x5EED1234;
    @%p1 bra END;
    st.global.u32 [%rd1], %r5;
END:
    ret;
}
"""

_TILES = "".join(
    "    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    f"{{%f{at}, %f{at + 1}, %f{at + 2}, %f{at + 3}}}, {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}}, "
    f"{{%f{at}, %f{at + 1}, %f{at + 2}, %f{at + 3}}};\n"
    for at in (1, 5, 9, 13)
)
TENSOR_OPERATIONS = 2 * 16 * 8 * 16 * 4 // 32  # of a thread in a round: a warp's four tiles by its 32 threads
TENSOR_ROUNDS = 100_000

TENSOR = f"""
.version 7.0
.target sm_80
.address_size 64

.visible .entry tensor(.param .u64 out, .param .u32 rounds)
{{
    .reg .pred %p<2>;
    .reg .b32 %r<10>;
    .reg .f32 %f<17>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd2, %rd1;
    ld.param.u32 %r1, [rounds];
    mov.u32 %r2, %tid.x;
    and.b32 %r2, %r2, 0x03FF03FF;
{"".join(f"    add.u32 %r{at}, %r2, {at};" + chr(10) for at in range(4, 10))}{
    "".join(f"    mov.f32 %f{at}, 0f00000000;" + chr(10) for at in range(1, 17))
}    mov.u32 %r3, 0;
AGAIN:
{_TILES}    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, %r1;
    @%p1 bra AGAIN;
{"".join(f"    add.f32 %f1, %f1, %f{at};" + chr(10) for at in range(2, 17))}    setp.neu.f32 %p1, %f1, 0fFF7FFFFF;
    @%p1 bra END;
    st.global.f32 [%rd2], %f1;
END:
    ret;
}}
"""

_SM_COUNT, _SM_THREADS = 16, 39  # CUdevice_attribute: SMs, and threads that one can hold
_BUFFER_BYTES = 2**30
_U64 = ctypes.c_uint64
_HANDLE = ctypes.c_void_p
_COUNT = ctypes.c_uint


class CudaError(Exception):
    """CUDA said no, or is not there."""


class Cuda:
    """The few calls of the driver API that the load needs, each checked."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"libcuda.so.1 can't be loaded: {error}") from error
        self.call("cuInit", _COUNT(0))

    def call(self, name: str, *args: object) -> None:
        """Calls by name; every argument is a ctypes object. Raises CudaError."""
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaError(f"libcuda.so.1 has no {name}")
        code = function(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            raise CudaError(f"{name} failed with {code}: {(text.value or b'unknown').decode()}")

    def attribute(self, device: ctypes.c_int, which: int) -> int:
        """A CUdevice_attribute."""
        found = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(which), device)
        return found.value


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel ready to be launched, and what one launch does."""

    launch: Callable[[], None]
    blocks: int
    operations: int
    bytes: int
    at_once: int


def prepare(cuda: Cuda, kind: str, share: float, multiprocessors: int) -> Kernel:
    """Compiles a kernel for the current context and gives it its memory. Raises CudaError."""
    text = {"fma": FMA, "tensor": TENSOR, "stream": STREAM}[kind]
    module, function, out = _HANDLE(), _HANDLE(), _U64()
    cuda.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text.encode()))
    cuda.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(kind.encode()))
    cuda.call("cuMemAlloc_v2", ctypes.byref(out), ctypes.c_size_t(256))
    blocks = max(1, round(share * multiprocessors))
    operations = size = 0
    values: list[ctypes.c_uint64 | ctypes.c_uint] = [out]
    if kind == "stream":
        blocks, size = 2 * multiprocessors, buffer_bytes(cuda)
        data = _U64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(data), ctypes.c_size_t(size))
        cuda.call("cuMemsetD32_v2", data, _COUNT(1), ctypes.c_size_t(size // 4))
        values += [data, _U64(size // 16)]
    else:
        rounds, each = (FMA_ROUNDS, FMA_OPERATIONS) if kind == "fma" else (TENSOR_ROUNDS, TENSOR_OPERATIONS)
        operations = blocks * THREADS * rounds * each
        values.append(_COUNT(rounds))
    # cuLaunchKernel takes an array of pointers to the arguments' values.
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    shape = (_COUNT(blocks), _COUNT(1), _COUNT(1), _COUNT(THREADS), _COUNT(1), _COUNT(1))

    def launch() -> None:
        cuda.call("cuLaunchKernel", function, *shape, _COUNT(0), _HANDLE(None), pointers, _HANDLE(None))
        assert values  # the pointers are into these

    return Kernel(launch, blocks, operations, size, 32 if kind == "stream" else 2)


def buffer_bytes(cuda: Cuda) -> int:
    """1 GiB, or a quarter of what is free where that is less."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return min(_BUFFER_BYTES, free.value // 4) // 4096 * 4096


def tell(event: str, **facts: object) -> None:
    """One line to whoever started this."""
    print(json.dumps({"event": event, **facts}), flush=True)


def run(kind: str, share: float, seconds: float, device_index: int, told_to_stop: Callable[[], bool]) -> None:
    """The load, from the context to its end. Raises CudaError."""
    cuda = Cuda()
    device, context = ctypes.c_int(), _HANDLE()
    cuda.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_index))
    multiprocessors = cuda.attribute(device, _SM_COUNT)
    cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        cuda.call("cuCtxSetCurrent", context)
        kernel = prepare(cuda, kind, share, multiprocessors)
        kernel.launch()  # the first pays for the compilation
        cuda.call("cuCtxSynchronize")
        tell(
            "ready",
            pid=os.getpid(),
            multiprocessors=multiprocessors,
            blocks=kernel.blocks,
            threads=THREADS,
            threads_per_multiprocessor=cuda.attribute(device, _SM_THREADS),
        )
        begin, launches = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds and not told_to_stop():
            for _ in range(kernel.at_once):
                kernel.launch()
            cuda.call("cuCtxSynchronize")
            launches += kernel.at_once
        took = time.perf_counter() - begin
        done = {"operations": kernel.operations * launches, "bytes": kernel.bytes * launches}
        tell("done", seconds=took, launches=launches, **done)
    finally:
        cuda.call("cuDevicePrimaryCtxRelease_v2", device)


def parent_is_done() -> bool:
    """Whether the pipe from the parent has ended."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable) and not os.read(sys.stdin.fileno(), 64)


def main() -> None:
    """Reads the command line and runs the load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kind", choices=KINDS, default="fma")
    parser.add_argument("--share", type=float, default=1.0, help="of the SMs, 0 to 1 (fma, tensor)")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", type=int, default=0, help="CUDA's index; see CUDA_VISIBLE_DEVICES")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends, too")
    args = parser.parse_args()
    signal.alarm(int(args.seconds) + 30)  # whatever hangs
    try:
        run(args.kind, args.share, args.seconds, args.device, parent_is_done if args.until_eof else lambda: False)
    except CudaError as error:
        tell("none", reason=str(error))


if __name__ == "__main__":
    main()
