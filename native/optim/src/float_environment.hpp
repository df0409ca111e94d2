// The floating-point environment that IEEE means, for as long as an object of this lives: nearest
// even, subnormals kept.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace infinity_optim {

class DefaultFloatEnvironment {
  public:
    DefaultFloatEnvironment() : before_(read()) { write(standard); }
    ~DefaultFloatEnvironment() { write(before_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

  private:
#if defined(__x86_64__)
    using Word = unsigned int;
    static constexpr Word standard =
        0x1f80;  // MXCSR after reset: exceptions masked, no FTZ, no DAZ
    static Word read() { return _mm_getcsr(); }
    static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
    using Word = std::uint64_t;
    static constexpr Word standard = 0;  // FPCR: nearest even, no flushing, no default NaN
    static Word read() {
        Word word;
        asm volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
#error "say how this architecture's floating-point environment is read and set"
#endif

    Word before_;
};

}  // namespace infinity_optim
