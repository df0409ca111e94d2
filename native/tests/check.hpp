// The whole test framework of the native suites: named tests, checks that say what they saw, one
// main(). A test executable runs the tests named on its command line, or all; exit 0 passed, 1
// failed, 77 skipped. docs/decisions/0001-dependencies.md says why this is not a library.
#pragma once

#include <concepts>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace check {

struct Case {
    std::string_view name;
    void (*body)();
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

struct Registered {
    Registered(std::string_view name, void (*body)()) { cases().push_back({name, body}); }
};

struct Failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Skipped : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename T>
std::string shown(const T& value) {
    if constexpr (requires(std::ostream& out) { out << value; }) {
        std::ostringstream out;
        out << value;
        return out.str();
    } else if constexpr (std::is_enum_v<T>) {
        return std::to_string(static_cast<long long>(value));
    } else {
        return "(a value that has no text)";
    }
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    throw Failed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
bool equal(const A& a, const B& b) {
    if constexpr (std::integral<A> && std::integral<B> && !std::same_as<A, bool> &&
                  !std::same_as<B, bool>) {
        return std::cmp_equal(a, b);
    } else {
        return a == b;
    }
}

inline int run(int argc, char** argv) {
    int failed = 0;
    int passed = 0;
    int skipped = 0;
    for (const Case& one : cases()) {
        bool chosen = argc < 2;
        for (int i = 1; i < argc; ++i) chosen = chosen || one.name == argv[i];
        if (!chosen) continue;
        try {
            one.body();
            ++passed;
        } catch (const Skipped& reason) {
            std::printf("SKIPPED %s: %s\n", one.name.data(), reason.what());
            ++skipped;
        } catch (const std::exception& error) {
            std::printf("FAILED %s: %s\n", one.name.data(), error.what());
            ++failed;
        }
    }
    std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    if (passed + failed + skipped == 0) {
        std::printf("no test of that name here\n");
        return 1;
    }
    if (failed > 0) return 1;
    return passed == 0 ? 77 : 0;
}

}  // namespace check

#define TEST(name)                                                  \
    static void name();                                             \
    static const check::Registered registered_##name(#name, &name); \
    static void name()

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) check::fail(__FILE__, __LINE__, "expected " #condition); \
    } while (false)

#define CHECK_EQ(left, right)                                                                      \
    do {                                                                                           \
        const auto left_ = (left);                                                                 \
        const auto right_ = (right);                                                               \
        if (!check::equal(left_, right_))                                                          \
            check::fail(__FILE__, __LINE__,                                                        \
                        "expected " #left " == " #right ", got " + check::shown(left_) + " and " + \
                            check::shown(right_));                                                 \
    } while (false)

#define CHECK_THROWS(expression, type)                                                             \
    do {                                                                                           \
        bool thrown_ = false;                                                                      \
        try {                                                                                      \
            (void)(expression);                                                                    \
        } catch (const type&) {                                                                    \
            thrown_ = true;                                                                        \
        }                                                                                          \
        if (!thrown_) check::fail(__FILE__, __LINE__, "expected " #expression " to throw " #type); \
    } while (false)

#define SKIP(reason) throw check::Skipped(reason)

#ifndef CHECK_NO_MAIN
int main(int argc, char** argv) {
    return check::run(argc, argv);
}
#endif
