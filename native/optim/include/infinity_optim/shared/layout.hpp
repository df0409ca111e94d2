// The arguments of an update kernel: one Segment per contiguous run of one parameter's elements,
// the same bytes on CPU and GPU. Plain C++ and CUDA C++ without any include; NVRTC compiles
// everything in shared/ as it is (docs/decisions/0006-optimizer-kernels.md).
#pragma once

#if defined(__FAST_MATH__)
#error "the update rules promise the same bits in every home: build them without fast-math"
#endif

namespace infinity_optim {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(float) == 4);

// The rules. Adam is AdamW too: how weight decay enters is a flag.
enum Rule : u32 {
    rule_adam = 0,
    rule_adam_amsgrad,
    rule_lion,
    rule_adagrad,
    rule_sgd,
    rule_sgd_momentum,
    rule_count
};

// How a stream of values is stored.
enum Format : u32 { format_none = 0, format_fp32, format_bf16, format_fp16, format_count };

enum Flag : u32 {
    flag_coupled_decay = 1,       // weight decay is added to the gradient
    flag_decoupled_decay = 2,     // weight decay shrinks the parameter
    flag_nesterov = 4,            // SGD
    flag_first_step = 8,          // SGD: the momentum begins as the gradient
    flag_split_master = 16,       // the master is the bf16 parameter and a 16-bit remainder
    flag_stochastic_moments = 32  // bf16 states are rounded stochastically
};

struct Segment {
    u64 numel;
    u64 first_element;  // index in its parameter; stochastic rounding uses it
    u64 key;            // of stochastic rounding: seed, parameter and step, mixed

    // Addresses of the first elements; 0 where the rule or the formats need none.
    u64 gradient;
    u64 master;     // fp32
    u64 remainder;  // 16 bits, with a split master
    u64 parameter;  // what the model computes with, written; with a split master the upper half,
                    // read and written
    u64 states[3];

    u32 rule;
    u32 gradient_format;
    u32 parameter_format;
    u32 state_format;
    u32 flags;

    // What a rule needs of its options in this step, computed once on the host in double.
    float gradient_factor;  // unscale times clip, negative to maximise
    float weight_decay;     // coupled
    float decay;            // decoupled: 1 - lr * weight_decay
    float step;             // minus the step size
    float keep1, take1;  // Adam: -, 1 - beta1. Lion: beta1, 1 - beta1. SGD: momentum, 1 - dampening
    float keep2, take2;  // Adam and Lion: beta2, 1 - beta2
    float root;          // Adam: sqrt(1 - beta2^t)
    float eps;
    u32 unused;
};
static_assert(sizeof(Segment) == 144);

// The norm sums the squares of blocks of `norm_block` elements, in `norm_lanes` lanes.
inline constexpr u32 norm_block = 4096;
inline constexpr u32 norm_lanes = 32;

}  // namespace infinity_optim
