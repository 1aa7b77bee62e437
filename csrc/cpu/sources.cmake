# The CPU attention kernels: PACKATTN_CPU_SOURCES, and the options of the files that are compiled for one
# instruction set. Include this from the directory that defines the target (source properties are per directory).
set(PACKATTN_CPU_SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/isa.cpp
    ${CMAKE_CURRENT_LIST_DIR}/attention.cpp
    ${CMAKE_CURRENT_LIST_DIR}/attention_plan.cpp
    ${CMAKE_CURRENT_LIST_DIR}/attention_portable.cpp)

# Products and sums are fused only where the source says so, whatever the compiler would like: a document's bits
# must not depend on how a loop was compiled. -Wno-psabi: a note about passing vectors, which are always inlined.
set(_packattn_kernel_options -O3 -fno-math-errno -ffp-contract=off -Wno-psabi)
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/attention_portable.cpp
                            PROPERTIES COMPILE_OPTIONS "${_packattn_kernel_options}")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND PACKATTN_CPU_SOURCES
       ${CMAKE_CURRENT_LIST_DIR}/attention_avx2.cpp
       ${CMAKE_CURRENT_LIST_DIR}/attention_avx512.cpp)
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/attention_avx2.cpp
                              PROPERTIES COMPILE_OPTIONS "${_packattn_kernel_options};-mavx2;-mfma;-mf16c")
  # -Wno-*uninitialized: GCC 12 warns inside its own AVX-512 header (GCC bug 105593).
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/attention_avx512.cpp
                              PROPERTIES COMPILE_OPTIONS
                              "${_packattn_kernel_options};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx2;-mfma;-mf16c;-Wno-uninitialized;$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>")
endif()
