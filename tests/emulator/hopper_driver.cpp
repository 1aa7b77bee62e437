// The Hopper forward on the emulator: the cases and checks of forward_driver.cpp, which says how to run it.
#define FORWARD_DRIVER_HOPPER
#include "forward_driver.cpp"
