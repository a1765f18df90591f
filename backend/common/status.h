#pragma once

#include <cassert>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace farandole {

enum class StatusCode : unsigned char {
  kOk,
  kInvalidArgument,  // misuse by the caller: the message names argument, value and expectation
  kMismatch,         // the two sides of a message disagree on its size or on what it is made of
  kTimeout,
  kAborted,
  kPeerFailed,   // the process on the other side died
  kPeerLeft,     // its connections are closed: it left in order, or nobody can tell
  kUnavailable,  // the machine or the build lacks what was asked for
  kInternal,
};

std::string_view toString(StatusCode code);

// Success, or a code with a message and the chain of what caused it. Ok is one
// null pointer; an error allocates. Copyable, so that one failure can be given
// to every operation that it ends.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message);

  static Status ok() { return {}; }
  static Status invalidArgument(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
  static Status timeout(std::string message) { return {StatusCode::kTimeout, std::move(message)}; }
  static Status aborted(std::string message) { return {StatusCode::kAborted, std::move(message)}; }
  static Status unavailable(std::string message) { return {StatusCode::kUnavailable, std::move(message)}; }
  static Status internal(std::string message) { return {StatusCode::kInternal, std::move(message)}; }

  bool isOk() const { return rep_ == nullptr; }
  explicit operator bool() const { return isOk(); }
  StatusCode code() const { return rep_ ? rep_->code : StatusCode::kOk; }
  std::string_view message() const { return rep_ ? std::string_view(rep_->message) : std::string_view(); }

  // The same failure seen from one level up: `context` comes first, this status becomes its cause.
  Status wrap(std::string context) const;

  Status wrapUnlessOk(std::string context) const { return isOk() ? *this : wrap(std::move(context)); }

  // "context: cause: cause", or "ok".
  std::string toString() const;

 private:
  struct Rep {
    StatusCode code;
    std::string message;
    std::shared_ptr<const Rep> cause;
  };
  std::shared_ptr<const Rep> rep_;
};

// A value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Status status) : state_(std::move(status)) { assert(!std::get<Status>(state_).isOk()); }

  bool isOk() const { return std::holds_alternative<T>(state_); }
  explicit operator bool() const { return isOk(); }
  Status status() const { return isOk() ? Status::ok() : std::get<Status>(state_); }

  T& value() & { return std::get<T>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T&& value() && { return std::get<T>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> state_;
};

// Returns the Status of `expr` from the enclosing function unless it is ok.
#define FARANDOLE_RETURN_IF_ERROR(expr)                                        \
  do {                                                                         \
    if (::farandole::Status status_ = (expr); !status_.isOk()) return status_; \
  } while (false)

}  // namespace farandole
