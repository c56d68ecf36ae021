# generated/kernel_hash.h in the build tree: a digest of the kernels and their tables, for which tuned choices hold.
file(GLOB_RECURSE hashed RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}
  src/epilogue/* src/kernels/* src/problems/* src/dispatch/*tables.h src/dispatch/*.in src/dispatch/*CMakeLists.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${hashed})
set(hashes "")
foreach(path ${hashed})
  file(SHA256 ${CMAKE_CURRENT_SOURCE_DIR}/${path} hash)
  string(APPEND hashes "${path} ${hash}\n")
endforeach()
string(SHA256 hash "${hashes}")
string(SUBSTRING ${hash} 0 12 hash)
file(CONFIGURE OUTPUT generated/kernel_hash.h CONTENT "#pragma once\n#define EPILOQ_KERNEL_HASH \"@hash@\"\n" @ONLY)
