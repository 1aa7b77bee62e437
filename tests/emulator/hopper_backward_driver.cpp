// The Hopper backward on the emulator: the cases and checks of backward_driver.cpp, which says how to run it.
#define BACKWARD_DRIVER_HOPPER
#include "backward_driver.cpp"
