// The names by which Python fills the library's structs, from the lists that generate them.
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <string>
#include <type_traits>

#include "../call.h"
#include "../dispatch/isa.h"
#include "../dispatch/tuples.h"
#include "../step/decode.h"

namespace {

// Of a field, as Python's `struct` has it.
template <class T>
constexpr char letter() {
  if constexpr (std::is_floating_point_v<T>) return sizeof(T) == 8 ? 'd' : 'f';
  return sizeof(T) == 8 ? 'q' : 'i';
}

// "name name ...", the number of a name being its place; fields also state their type, "name:q name:d ...", and tuples
// their tensors, "Name:tensor,tensor Name:tensor ...".
std::string names(const std::string& of) {
  using namespace kvq;
  std::string text;
#define KVQ_NAME(name) text += #name " ";
#define KVQ_NUMBER(name, value) text += #name ":" + std::to_string(value) + " ";
#define KVQ_FIELD(type, name) text += std::string(#name ":") + letter<type>() + " ";
#define KVQ_TENSOR(name) text += #name ",";
#define KVQ_TUPLE(Name, TENSORS) \
  text += #Name ":";             \
  TENSORS(KVQ_TENSOR)            \
  text.back() = ' ';
  if (of == "layout") {
    KVQ_LAYOUT_FIELDS(KVQ_FIELD)
  } else if (of == "companions") {
    KVQ_COMPANION_FIELDS(KVQ_FIELD)
  } else if (of == "scores") {
    KVQ_SCORE_FIELDS(KVQ_FIELD)
  } else if (of == "team") {
    KVQ_TEAM_FIELDS(KVQ_FIELD)
  } else if (of == "tuples") {
    KVQ_TUPLES(KVQ_TUPLE)
  } else if (of == "keys") {
    KVQ_KEY_KINDS(KVQ_NAME)
  } else if (of == "values") {
    KVQ_VALUE_KINDS(KVQ_NAME)
  } else if (of == "dtypes") {
    KVQ_DTYPES(KVQ_NAME)
  } else if (of == "numbers") {
    KVQ_NUMBERS(KVQ_NUMBER)
  } else if (of == "isas") {
    for (int level = 0; level < kvq::ISAS; ++level) text += std::string(kvq::isa(level).name) + " ";
  } else {
    TVM_FFI_THROW(ValueError) << "nothing here is called " << of;
  }
  return text;
}

tvm::ffi::String exported_names(tvm::ffi::String of) { return names(of); }

int64_t best_isa() { return kvq::best_isa(); }
bool has_tiles(int64_t level) { return kvq::has_tiles(int(level)); }
bool has_byte_tiles(int64_t level) { return kvq::has_byte_tiles(int(level)); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(names, exported_names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(best_isa, best_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_tiles, has_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_byte_tiles, has_byte_tiles);
