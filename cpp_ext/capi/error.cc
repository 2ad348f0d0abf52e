#include "capi/error.h"

#include <new>
#include <stdexcept>

namespace gradfuse::capi {
namespace {

thread_local std::string last_error;

int Keep(const char* function, const char* message, int code) {
  last_error = std::string(function) + ": " + message;
  return code;
}

}  // namespace

void ThrowIfError(const Status& status) {
  if (status.ok()) return;
  throw Error(status.code() == StatusCode::kFailed ? ACLNN_ERR_RUNTIME_ERROR : ACLNN_ERR_PARAM_INVALID,
              status.message());
}

int HandleException(const char* function) noexcept {
  try {
    try {
      throw;
    } catch (const Error& error) {
      return Keep(function, error.what(), error.code());
    } catch (const std::bad_alloc&) {
      return Keep(function, "out of memory", ACL_ERROR_BAD_ALLOC);
    } catch (const std::length_error&) {
      return Keep(function, "out of memory", ACL_ERROR_BAD_ALLOC);
    } catch (const std::exception& error) {
      return Keep(function, error.what(), ACL_ERROR_FAILURE);
    }
  } catch (...) {
    return ACL_ERROR_FAILURE;  // no memory for the message either
  }
}

}  // namespace gradfuse::capi

const char* aclGetRecentErrMsg() { return gradfuse::capi::last_error.c_str(); }
