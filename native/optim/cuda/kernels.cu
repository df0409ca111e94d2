// The GPU's home of the update rules: the loops around the shared text. Compiled by NVRTC when the program runs.
#include "infinity_optim/shared/norm.hpp"

using namespace infinity_optim;

namespace {

template <class R>
__device__ void update_segment(const Segment& segment) {
    const Segment s = segment;
    const u64 stride = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < s.numel; i += stride)
        cuda::update_at_<R, float, 1>(s, i);
}

// One warp adds the squares of one block: lane j those of elements j, j + 32, ...; then the tree of the norm.
template <class Source>
__device__ void sum_blocks(const Source source, u64 numel, double* sums) {
    const u32 lane = threadIdx.x % norm_lanes;
    const u64 first = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / norm_lanes;
    const u64 warps = u64(gridDim.x) * blockDim.x / norm_lanes;
    const u64 blocks = (numel + norm_block - 1) / norm_block;
    for (u64 block = first; block < blocks; block += warps) {
        const u64 begin = block * norm_block;
        const u64 end = begin + norm_block < numel ? begin + norm_block : numel;
        double sum = 0.0;
        for (u64 i = begin + lane; i < end; i += norm_lanes)
            sum = cuda::add_square_(sum, source.template at<float>(i));
        for (u32 half = norm_lanes / 2; half > 0; half /= 2)
            sum = cuda::add_(sum, __shfl_down_sync(0xffffffffu, sum, half));
        if (lane == 0) sums[block] = cuda::canonical_sum_(sum);
    }
}

}  // namespace

// Row y of the grid works on segment y.
extern "C" __global__ void update(const Segment* segments) {
    const Segment& segment = segments[blockIdx.y];
    switch (segment.rule) {
        case rule_adam:
            return update_segment<cuda::Adam<false>>(segment);
        case rule_adam_amsgrad:
            return update_segment<cuda::Adam<true>>(segment);
        case rule_lion:
            return update_segment<cuda::Lion>(segment);
        case rule_adagrad:
            return update_segment<cuda::Adagrad>(segment);
        case rule_sgd:
            return update_segment<cuda::Sgd>(segment);
        case rule_sgd_momentum:
            return update_segment<cuda::SgdMomentum>(segment);
    }
}

extern "C" __global__ void block_sums(u64 gradient, u32 format, u64 numel, double* sums) {
    sum_blocks(cuda::Reading{gradient, format}, numel, sums);
}

extern "C" __global__ void accumulate(u64 into, u64 gradient, u32 format, u32 begins, u64 numel, double* sums) {
    sum_blocks(cuda::Accumulating{into, gradient, format, begins != 0}, numel, sums);
}
