// The checks themselves must be able to fail; otherwise every other native test is worth nothing.
#include "check.hpp"

TEST(a_false_condition_fails_and_names_its_line) {
    std::string message;
    try {
        CHECK(1 == 2);
    } catch (const check::Failed& failure) {
        message = failure.what();
    }
    CHECK(message.find("expected 1 == 2") != std::string::npos);
    CHECK(message.find("test_check.cpp:") != std::string::npos);
}

TEST(unequal_values_fail_and_are_shown) {
    std::string message;
    try {
        CHECK_EQ(40 + 2, 43U);
    } catch (const check::Failed& failure) {
        message = failure.what();
    }
    CHECK(message.find("got 42 and 43") != std::string::npos);
}

TEST(values_of_different_signedness_compare_by_value) {
    CHECK(!check::equal(-1, 0xFFFFFFFFU));
    CHECK(check::equal(7, 7UL));
}

TEST(an_expression_that_does_not_throw_fails) {
    CHECK_THROWS([] { CHECK_THROWS(1 + 1, std::runtime_error); }(), check::Failed);
}

TEST(an_unknown_name_is_a_failure_not_an_empty_success) {
    char program[] = "test_check";
    char name[] = "no_such_test";
    char* arguments[] = {program, name};
    CHECK_EQ(check::run(2, arguments), 1);
}
