# The CPU attention kernels: PACKATTN_CPU_SOURCES, and the options of the files that are compiled for one
# instruction set. Include this from the directory that defines the target (source properties are per directory).
set(PACKATTN_CPU_SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/isa.cpp
    ${CMAKE_CURRENT_LIST_DIR}/attention.cpp)
