"""Measures latencies of a GPU that the model of time needs, with clocks read on the multiprocessor.

    python -m ptxsim.model.latencies     (needs nvcc and a GPU of compute capability 9.0 or later)

Each number is clocks of one multiprocessor, the least of several runs. A signal goes from a warp to another
and back; half of it is an arrival, the completed phase and the end of the wait.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
#include <cstdio>
#include <cstdint>
#include <cooperative_groups.h>
#define ROUNDS 512
// An address that the compiler does not make again in each round of a loop.
__device__ __forceinline__ uint32_t place(void* p) {
    uint32_t a = (uint32_t)__cvta_generic_to_shared(p); asm volatile("" : "+r"(a)); return a; }
__device__ __forceinline__ void init(uint32_t b, int n) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void arrive(uint32_t b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void arrive_remote(uint32_t b) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], 1;" ::"r"(b) : "memory"); }
__device__ __forceinline__ void wait(uint32_t b, int parity) {
    asm volatile("{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(b), "r"(parity) : "memory"); }

__global__ void done_wait(long long* out) {
    __shared__ uint64_t bar; uint32_t b = place(&bar);
    if (threadIdx.x == 0) { init(b, 1); arrive(b); }
    __syncthreads();
    for (int i = 0; i < 8; i++) wait(b, 0);
    long long t = clock64();
#pragma unroll 16
    for (int i = 0; i < ROUNDS; i++) wait(b, 0);
    if (threadIdx.x == 0) out[0] = clock64() - t; }

__global__ void signal(long long* out) {
    __shared__ uint64_t bars[2]; uint32_t a = place(&bars[0]), b = place(&bars[1]);
    int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) { init(a, 1); init(b, 1); }
    __syncthreads();
    long long t = clock64();
#pragma unroll 1
    for (int i = 0; i < ROUNDS; i++) {
        if (warp == 0) { if (threadIdx.x % 32 == 0) arrive(a); __syncwarp(); wait(b, i & 1); }
        else { wait(a, i & 1); if (threadIdx.x % 32 == 0) arrive(b); __syncwarp(); } }
    if (threadIdx.x == 0) out[0] = clock64() - t; }

__global__ void __cluster_dims__(2, 1, 1) signal_remote(long long* out) {
    __shared__ uint64_t bar; uint32_t b = place(&bar), other;
    auto cluster = cooperative_groups::this_cluster();
    int rank = cluster.block_rank();
    if (threadIdx.x == 0) init(b, 1);
    cluster.sync();
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(b), "r"(1 - rank));
    asm volatile("" : "+r"(other));
    long long t = clock64();
#pragma unroll 1
    for (int i = 0; i < ROUNDS; i++) {
        if (rank == 0) { if (threadIdx.x == 0) arrive_remote(other); __syncwarp(); wait(b, i & 1); }
        else { wait(b, i & 1); if (threadIdx.x == 0) arrive_remote(other); __syncwarp(); } }
    if (threadIdx.x == 0 && rank == 0) out[0] = clock64() - t;
    cluster.sync(); }

__global__ void signal_named(long long* out) {
    int warp = threadIdx.x / 32;
    __syncthreads();
    long long t = clock64();
#pragma unroll 1
    for (int i = 0; i < ROUNDS; i++) {
        if (warp == 0) asm volatile("bar.arrive 1, 64;\nbar.sync 2, 64;" ::: "memory");
        else asm volatile("bar.sync 1, 64;\nbar.arrive 2, 64;" ::: "memory"); }
    if (threadIdx.x == 0) out[0] = clock64() - t; }

template <int WHAT, int CHAINS> __global__ void arithmetic(long long* out) {
    float x[CHAINS];
    for (int c = 0; c < CHAINS; c++) x[c] = 1.0f + threadIdx.x * 1e-3f + c;
    long long t = clock64();
#pragma unroll 8
    for (int i = 0; i < ROUNDS; i++)
#pragma unroll
        for (int c = 0; c < CHAINS; c++) {
            if (WHAT == 0) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[c]));
            if (WHAT == 1) asm volatile("fma.rn.ftz.f32 %0, %0, %0, %0;" : "+f"(x[c]));
            if (WHAT == 2) asm volatile("max.ftz.f32 %0, %0, %1;" : "+f"(x[c]) : "f"(x[(c + 1) % CHAINS]));
            if (WHAT == 3)
                asm volatile("{.reg .b32 h; cvt.rn.bf16x2.f32 h, %0, %0; mov.b32 %0, h;}" : "+f"(x[c])); }
    long long spent = clock64() - t;
    float sum = 0;
    for (int c = 0; c < CHAINS; c++) sum += x[c];
    if (threadIdx.x == 0) { out[0] = spent; out[1] = (long long)sum; } }

__global__ void chase(long long* out) {
    __shared__ int next[32];
    next[threadIdx.x] = threadIdx.x;
    __syncwarp();
    int at = threadIdx.x;
    long long t = clock64();
#pragma unroll 8
    for (int i = 0; i < ROUNDS; i++) at = ((volatile int*)next)[at];
    if (threadIdx.x == 0) { out[0] = clock64() - t; out[1] = at; } }

template <int BYTES> __global__ void copy(long long* out, const char* from) {
    extern __shared__ __align__(128) char to[];
    __shared__ uint64_t bar; uint32_t b = place(&bar);
    if (threadIdx.x == 0) init(b, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    long long t = 0;
    for (int i = 0; i < 16; i++) {
        if (i == 1) t = clock64();
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                         ::"r"(b), "r"(BYTES) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                         "[%0], [%1], %2, [%3];"
                         ::"r"(place(to)), "l"(from), "r"(BYTES), "r"(b) : "memory"); }
        __syncwarp();
        wait(b, i & 1); }
    if (threadIdx.x == 0) out[0] = clock64() - t; }

template <class Launch> void show(const char* name, double per, Launch launch) {
    long long *out, best = 1LL << 60;
    cudaMallocManaged(&out, 64);
    for (int i = 0; i < 5; i++) {
        launch(out);
        cudaError_t error = cudaDeviceSynchronize();
        if (error != cudaSuccess) { printf("%s: %s\n", name, cudaGetErrorString(error)); return; }
        if (out[0] < best) best = out[0]; }
    printf("%-64s %8.1f\n", name, best / per); }

#define SHOW(name, per, launch) show(name, per, [=](long long* o) { launch; })
template <int BYTES> void show_copy(const char* name, const char* from) {
    cudaFuncSetAttribute(copy<BYTES>, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 16);
    SHOW(name, 15, (copy<BYTES><<<1, 32, 1 << 16>>>(o, from))); }

int main() {
    char* from; cudaMalloc(&from, 1 << 17);
    SHOW("mbarrier.try_wait of a phase that is over", ROUNDS, (done_wait<<<1, 32>>>(o)));
    SHOW("signal by mbarrier, warp to warp", 2 * ROUNDS, (signal<<<1, 64>>>(o)));
    SHOW("signal by mbarrier, CTA to CTA of a cluster", 2 * ROUNDS, (signal_remote<<<2, 32>>>(o)));
    SHOW("signal by named barrier, warp to warp", 2 * ROUNDS, (signal_named<<<1, 64>>>(o)));
    SHOW("ex2, one after another", ROUNDS, (arithmetic<0, 1><<<1, 32>>>(o)));
    SHOW("ex2, eight at once in one warp", 8 * ROUNDS, (arithmetic<0, 8><<<1, 32>>>(o)));
    SHOW("ex2, two warps of a sub-core, per instruction", 16 * ROUNDS, (arithmetic<0, 8><<<1, 256>>>(o)));
    SHOW("fma, one after another", ROUNDS, (arithmetic<1, 1><<<1, 32>>>(o)));
    SHOW("fma, eight at once", 8 * ROUNDS, (arithmetic<1, 8><<<1, 32>>>(o)));
    SHOW("max, one after another", ROUNDS, (arithmetic<2, 1><<<1, 32>>>(o)));
    SHOW("max, eight at once", 8 * ROUNDS, (arithmetic<2, 8><<<1, 32>>>(o)));
    SHOW("cvt.bf16x2, one after another", ROUNDS, (arithmetic<3, 1><<<1, 32>>>(o)));
    SHOW("cvt.bf16x2, eight at once", 8 * ROUNDS, (arithmetic<3, 8><<<1, 32>>>(o)));
    SHOW("ld.shared, one after another (with its address)", ROUNDS, (chase<<<1, 32>>>(o)));
    show_copy<1024>("bulk copy of 1 KB from L2 and its wait", from);
    show_copy<16384>("bulk copy of 16 KB", from);
    show_copy<32768>("bulk copy of 32 KB", from);
    return 0; }
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "latencies.cu", Path(folder) / "latencies"
        source.write_text(SOURCE)
        command = ["nvcc", "-arch=native", "-O3", "-std=c++17", "-o", str(program), str(source)]
        subprocess.run(command, check=True)
        print(subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout, end="")


if __name__ == "__main__":
    main()
