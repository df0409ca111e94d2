// `fault`: another backend, with requests that go wrong as a plan says. What happens to a request
// is decided when it is pushed, from the plan's seed and the requests before it alone; when a
// completion may pass is decided by what else passes and by the clock. A test instrument: waiting
// for held completions, it looks up every 200 us.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backends.hpp"

namespace deepnvme {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = FaultRule::Kind;

constexpr std::chrono::microseconds slice(200);

void check(const FaultRule& rule) {
    const auto refuse = [](const std::string& what) {
        throw std::invalid_argument("fault rule: " + what);
    };
    if (!(rule.probability >= 0.0 && rule.probability <= 1.0)) {
        refuse("probability must be in [0, 1], got " + std::to_string(rule.probability));
    }
    if (rule.kind == Kind::fail && rule.error <= 0) {
        refuse("fail needs a positive errno, got " + std::to_string(rule.error));
    }
    if (rule.kind == Kind::delay && rule.delay_us == 0) refuse("delay needs delay_us > 0");
    if (rule.kind == Kind::reorder && rule.hold == 0) refuse("reorder needs hold > 0");
    if (rule.kind == Kind::throttle &&
        !(rule.bytes_per_s > 0.0 && std::isfinite(rule.bytes_per_s))) {
        refuse("throttle needs bytes_per_s > 0, got " + std::to_string(rule.bytes_per_s));
    }
}

// Half of the request, whole sectors where it has any to spare, but never nothing: that would read
// as end of file.
[[nodiscard]] std::uint32_t half_of(std::uint32_t length) noexcept {
    constexpr std::uint32_t sector = 512;
    const std::uint32_t half = length / 2;
    return half >= sector ? half / sector * sector : std::max(half, std::min(length, 1U));
}

// A rule, what it has seen, and its own stream of random numbers: rules do not disturb one another.
class ActiveRule {
  public:
    ActiveRule(FaultRule rule, std::uint64_t stream) : rule_(std::move(rule)), stream_(stream) {
        check(rule_);
    }

    [[nodiscard]] const FaultRule& rule() const noexcept { return rule_; }

    // Counts the request; true when it is one that the rule applies to.
    [[nodiscard]] bool strikes(Verb verb) noexcept {
        const bool matches =
            rule_.verbs.empty() ||
            std::find(rule_.verbs.begin(), rule_.verbs.end(), verb) != rule_.verbs.end();
        if (!matches) return false;
        ++seen_;
        if (rule_.nth != 0 && seen_ == rule_.nth) return true;
        if (rule_.every != 0 && seen_ % rule_.every == 0) return true;
        return rule_.probability > 0.0 && draw() < rule_.probability;
    }

    // For throttle: when `nbytes` more have passed at the rule's rate.
    [[nodiscard]] Clock::time_point passed_at(Clock::time_point now, std::int64_t nbytes) noexcept {
        const std::chrono::duration<double> takes(static_cast<double>(nbytes) / rule_.bytes_per_s);
        busy_until_ =
            std::max(busy_until_, now) + std::chrono::duration_cast<Clock::duration>(takes);
        return busy_until_;
    }

  private:
    // Uniform in [0, 1), the same everywhere: the splitmix64 generator's upper 53 bits.
    [[nodiscard]] double draw() noexcept {
        std::uint64_t bits = stream_ += 0x9E3779B97F4A7C15U;
        bits = (bits ^ (bits >> 30U)) * 0xBF58476D1CE4E5B9U;
        bits = (bits ^ (bits >> 27U)) * 0x94D049BB133111EBU;
        bits ^= bits >> 31U;
        return static_cast<double>(bits >> 11U) * 0x1.0p-53;
    }

    FaultRule rule_;
    std::uint64_t stream_;
    std::uint64_t seen_ = 0;
    Clock::time_point busy_until_;
};

// What was decided for one request.
struct Fate {
    std::uint64_t token = 0;
    int error = 0;
    std::chrono::microseconds delay{0};
    std::uint32_t hold = 0;
    std::vector<ActiveRule*> throttles{};
};

// A completion that may not pass yet: not before `due`, not before `hold` others have overtaken it.
struct Held {
    Completion completion;
    Clock::time_point due;
    std::uint32_t hold = 0;
};

class FaultBackend final : public Backend {
  public:
    FaultBackend(std::unique_ptr<Backend> inner, FaultPlan plan)
        : inner_(std::move(inner)),
          name_("fault(" + std::string(inner_->name()) + ")"),
          fates_(inner_->capacity()) {
        rules_.reserve(plan.rules.size());  // a Fate points at them
        for (FaultRule& rule : plan.rules) {
            const std::uint64_t stream = plan.seed + rules_.size() * 0xD1342543DE82EF95U;
            rules_.emplace_back(std::move(rule), stream);
        }
        for (std::size_t i = fates_.size(); i > 0; --i) free_.push_back(i - 1);
    }

    [[nodiscard]] std::string_view name() const noexcept override { return name_; }
    void attach() override { inner_->attach(); }
    [[nodiscard]] unsigned capacity() const noexcept override { return inner_->capacity(); }

    [[nodiscard]] bool push(const Request& request) override {
        if (in_inner_ + held_.size() == capacity()) return false;
        Request changed = request;
        Fate fate = decide(changed);
        if (fate.error != 0) {
            hold(fate, -fate.error);
            return true;
        }
        const std::size_t place = free_.back();
        changed.token = place;
        if (!inner_->push(changed))
            throw std::logic_error("a backend refused a request that it has room for");
        free_.pop_back();
        fates_[place] = std::move(fate);
        ++in_inner_;
        return true;
    }

    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> out, Wait wait) override {
        take(Wait::none);
        for (;;) {
            const std::size_t count = deliver(out);
            const bool woken = wait != Wait::none && take_wake();
            if (count > 0 || woken || wait == Wait::none) return count;
            if (auto due = next_due()) {
                if (is_brief(wait)) due = std::min(*due, Clock::now() + brief);
                sleep_until(in_inner_ > 0 ? std::min(*due, Clock::now() + slice) : *due);
                take(Wait::none);
            } else {
                take(is_brief(wait) ? Wait::briefly : Wait::some);
            }
            if (is_brief(wait)) return deliver(out);
        }
    }

    [[nodiscard]] bool serves_any_thread() const noexcept override {
        return inner_->serves_any_thread();
    }

    void wake() noexcept override {
        {
            const std::lock_guard lock(mutex_);
            woken_ = true;
        }
        wake_called_.notify_one();
        inner_->wake();  // after the flag: the thread that it wakes finds the flag set
    }

    [[nodiscard]] int register_buffers(std::span<const iovec> buffers) noexcept override {
        return inner_->register_buffers(buffers);
    }

  private:
    // Lets every rule see the request. Several may strike one request; the first `fail` decides its
    // error.
    [[nodiscard]] Fate decide(Request& request) {
        Fate fate{.token = request.token};
        for (ActiveRule& active : rules_) {
            if (!active.strikes(request.verb)) continue;
            const FaultRule& rule = active.rule();
            switch (rule.kind) {
                case Kind::fail:
                    if (fate.error == 0) fate.error = rule.error;
                    break;
                case Kind::shorten:
                    request.length = rule.length == 0 ? half_of(request.length)
                                                      : std::min(request.length, rule.length);
                    break;
                case Kind::delay:
                    fate.delay += std::chrono::microseconds(rule.delay_us);
                    break;
                case Kind::reorder:
                    fate.hold = std::max(fate.hold, rule.hold);
                    break;
                case Kind::throttle:
                    fate.throttles.push_back(&active);
                    break;
            }
        }
        return fate;
    }

    void hold(const Fate& fate, std::int64_t result) {
        const Clock::time_point now = Clock::now();
        Clock::time_point due = now + fate.delay;
        for (ActiveRule* throttle : fate.throttles) {
            due = std::max(due, throttle->passed_at(now, std::max<std::int64_t>(result, 0)));
        }
        held_.push_back({{fate.token, result}, due, fate.hold});
    }

    // Submits, and holds everything that the wrapped backend has completed.
    void take(Wait wait) {
        std::array<Completion, 64> batch;
        std::size_t count = 0;
        do {
            count = inner_->submit_and_reap(batch, wait);
            for (const Completion& completion : std::span(batch).first(count)) {
                const auto place = static_cast<std::size_t>(completion.token);
                hold(fates_[place], completion.result);
                free_.push_back(place);
                --in_inner_;
            }
            wait = Wait::none;
        } while (count == batch.size());
    }

    // Lets pass what may pass, in the order held.
    [[nodiscard]] std::size_t deliver(std::span<Completion> out) {
        const Clock::time_point now = Clock::now();
        std::size_t filled = 0;
        while (filled < out.size() && !held_.empty()) {
            auto next = std::find_if(held_.begin(), held_.end(), [&](const Held& one) {
                return one.hold == 0 && one.due <= now;
            });
            if (next == held_.end()) {
                if (in_inner_ > 0 || next_due()) break;
                next = held_.begin();  // all are held for others, and there are none
                next->hold = 0;
                continue;
            }
            out[filled++] = next->completion;
            const auto behind = held_.erase(next);
            for (Held& overtaken : std::span(held_.begin(), behind)) {
                overtaken.hold -= std::min(overtaken.hold, 1U);
            }
        }
        return filled;
    }

    // When the first of those that wait for the clock alone may pass.
    [[nodiscard]] std::optional<Clock::time_point> next_due() const {
        std::optional<Clock::time_point> first;
        for (const Held& one : held_) {
            if (one.hold == 0) first = std::min(first.value_or(one.due), one.due);
        }
        return first;
    }

    [[nodiscard]] bool take_wake() {
        const std::lock_guard lock(mutex_);
        return std::exchange(woken_, false);
    }

    void sleep_until(Clock::time_point moment) {
        std::unique_lock lock(mutex_);
        wake_called_.wait_until(lock, moment, [this] { return woken_; });
    }

    std::unique_ptr<Backend> inner_;
    std::string name_;
    std::vector<ActiveRule> rules_;
    std::vector<Fate>
        fates_;  // of the requests in the wrapped backend; their token there is the place here
    std::vector<std::size_t> free_;  // places in fates_
    std::vector<Held> held_;         // in the order in which the wrapped backend completed them
    std::size_t in_inner_ = 0;

    std::mutex mutex_;
    std::condition_variable wake_called_;
    bool woken_ = false;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner, FaultPlan plan) {
    if (inner == nullptr)
        throw std::invalid_argument("a fault backend wraps another one, got none");
    return std::make_unique<FaultBackend>(std::move(inner), std::move(plan));
}

}  // namespace deepnvme
