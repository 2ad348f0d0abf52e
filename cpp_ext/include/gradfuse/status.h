#pragma once

#include <string>
#include <utility>

namespace gradfuse {

enum class StatusCode { kOk, kInvalidArgument, kNotSupported, kFailed };

// Outcome of a call: success, or why not, in one line that a user can act on.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace gradfuse
