//! Checks whether KVM works by running a minimal guest. Opening the device is not enough: nested KVM may emulate
//! instructions, and a guest then is very slow or fails at the first instruction that is not emulated. See
//! docs/decisions/0020.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::sync::mpsc;
use std::time::Duration;

const KVM_DEVICE: &str = "/dev/kvm";

/// The timeout of the test guest, which normally takes a millisecond.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why guests cannot run under KVM.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KvmError {
    #[error("{KVM_DEVICE} is missing")]
    NoDevice,
    /// The device exists, but this user may not open it.
    #[error("failed to open {KVM_DEVICE}: {0}")]
    PermissionDenied(String),
    #[error("failed to open {KVM_DEVICE}: {0}")]
    Unusable(String),
    #[error("a test guest did not run: {0}")]
    TestGuestFailed(String),
}

/// Checks whether guests can run under KVM.
pub(crate) fn probe() -> Result<(), KvmError> {
    let opened = OpenOptions::new().read(true).write(true).open(KVM_DEVICE);
    let kvm = opened.map_err(|error| match error.kind() {
        ErrorKind::NotFound => KvmError::NoDevice,
        ErrorKind::PermissionDenied => KvmError::PermissionDenied(error.to_string()),
        _ => KvmError::Unusable(error.to_string()),
    })?;
    let failed = |reason: &dyn std::fmt::Display| KvmError::TestGuestFailed(reason.to_string());
    let (sender, receiver) = mpsc::channel();
    // On a separate thread, because it may never return.
    let run = std::thread::Builder::new().name("kvm".into()).spawn(move || sender.send(run(&kvm)));
    run.map_err(|error| failed(&error))?;
    match receiver.recv_timeout(PROBE_TIMEOUT) {
        Ok(Ok(reason)) => check_exit_reason(reason).map_err(|reason| failed(&reason)),
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(failed(&"it timed out")),
    }
}

/// The reason of a VM exit, `KVM_EXIT_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ExitReason(u32);

const EXIT_HLT: ExitReason = ExitReason(5);
const EXIT_FAIL_ENTRY: ExitReason = ExitReason(9);
const EXIT_INTERNAL_ERROR: ExitReason = ExitReason(17);

fn check_exit_reason(reason: ExitReason) -> Result<(), String> {
    match reason {
        EXIT_HLT => Ok(()),
        EXIT_INTERNAL_ERROR => Err("the kernel failed to run an ordinary instruction".into()),
        EXIT_FAIL_ENTRY => Err("the CPU failed to enter the guest".into()),
        ExitReason(other) => Err(format!("it exited with reason {other}")),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn run(_: &File) -> io::Result<ExitReason> {
    Err(io::Error::new(ErrorKind::Unsupported, "only supported on x86-64"))
}

#[cfg(target_arch = "x86_64")]
fn run(kvm: &File) -> io::Result<ExitReason> {
    guest::run(kvm)
}

/// The test guest.
#[cfg(target_arch = "x86_64")]
mod guest {
    #![expect(unsafe_code, reason = "none of our dependencies has a safe interface to KVM")]

    use std::fs::File;
    use std::io;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::ptr;

    use nix::libc;

    use super::ExitReason;

    const CREATE_VM: libc::c_ulong = 0xae01;
    const GET_VCPU_MMAP_SIZE: libc::c_ulong = 0xae04;
    const CREATE_VCPU: libc::c_ulong = 0xae41;
    const SET_USER_MEMORY_REGION: libc::c_ulong = 0x4020_ae46;
    const RUN: libc::c_ulong = 0xae80;
    const SET_REGS: libc::c_ulong = 0x4090_ae82;
    const GET_SREGS: libc::c_ulong = 0x8138_ae83;
    const SET_SREGS: libc::c_ulong = 0x4138_ae84;

    const MEMORY_SIZE: usize = 64 << 10;

    /// The offset of `exit_reason` in `struct kvm_run`.
    const EXIT_REASON_OFFSET: usize = 8;

    /// `pxor xmm0, xmm0; hlt`: KVM's emulator supports the second instruction, but not the first.
    const PROGRAM: [u8; 5] = [0x66, 0x0f, 0xef, 0xc0, 0xf4];

    #[repr(C, align(4096))]
    struct Memory([u8; MEMORY_SIZE]);

    /// `struct kvm_userspace_memory_region`.
    #[repr(C)]
    struct MemoryRegion {
        slot: u32,
        flags: u32,
        guest_address: u64,
        size: u64,
        address: u64,
    }

    /// `struct kvm_regs`: 16 general registers, the instruction pointer, the flags.
    #[repr(C)]
    struct Registers([u64; 18]);

    /// `struct kvm_sregs`: segments, tables, control registers.
    #[repr(C)]
    struct SpecialRegisters([u64; 39]);

    const CR0: usize = 28;
    const CR4: usize = 31;

    fn ioctl(file: &File, request: libc::c_ulong, argument: libc::c_ulong) -> io::Result<libc::c_int> {
        // SAFETY: the requests made by this function take integers.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }

    fn ioctl_with<T>(file: &File, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is made with the type whose size it encodes.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), request, ptr::from_mut(argument)) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn owned_file(fd: libc::c_int) -> File {
        // SAFETY: the kernel just created the file descriptor, and it has no other owner.
        unsafe { File::from_raw_fd(fd) }
    }

    pub(super) fn run(kvm: &File) -> io::Result<ExitReason> {
        // Declared before the VM, so that it is dropped after it.
        let mut memory = Box::new(Memory([0; MEMORY_SIZE]));
        memory.0[..PROGRAM.len()].copy_from_slice(&PROGRAM);
        let vm = owned_file(ioctl(kvm, CREATE_VM, 0)?);
        let address = ptr::from_mut(&mut *memory).addr() as u64;
        let mut region =
            MemoryRegion { slot: 0, flags: 0, guest_address: 0, size: MEMORY_SIZE as u64, address };
        ioctl_with(&vm, SET_USER_MEMORY_REGION, &mut region)?;
        let cpu = owned_file(ioctl(&vm, CREATE_VCPU, 0)?);

        let mut special = SpecialRegisters([0; 39]);
        ioctl_with(&cpu, GET_SREGS, &mut special)?;
        // The code segment begins at 0: its base, and its selector in the middle of the next word.
        special.0[0] = 0;
        special.0[1] &= !(0xffff << 32);
        // Enable the FPU without emulation, and SSE instructions.
        special.0[CR0] = (special.0[CR0] | 0x2) & !0x4;
        special.0[CR4] |= 0x600;
        ioctl_with(&cpu, SET_SREGS, &mut special)?;
        let mut registers = Registers([0; 18]);
        // Bit 1 of the flags is always set.
        registers.0[17] = 2;
        ioctl_with(&cpu, SET_REGS, &mut registers)?;

        let shared = KvmRun::map(&cpu, ioctl(kvm, GET_VCPU_MMAP_SIZE, 0)?)?;
        loop {
            match ioctl(&cpu, RUN, 0) {
                Ok(_) => return Ok(shared.exit_reason()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The mapping of `struct kvm_run`, which the kernel shares.
    struct KvmRun {
        at: *mut libc::c_void,
        size: usize,
    }

    impl KvmRun {
        fn map(cpu: &File, size: libc::c_int) -> io::Result<Self> {
            let size = usize::try_from(size).ok().filter(|size| *size >= EXIT_REASON_OFFSET + 4);
            let size = size.ok_or(io::ErrorKind::InvalidData)?;
            // SAFETY: creates a new mapping at an address chosen by the kernel.
            let at = unsafe {
                libc::mmap(ptr::null_mut(), size, libc::PROT_READ, libc::MAP_SHARED, cpu.as_raw_fd(), 0)
            };
            if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { at, size }) }
        }

        fn exit_reason(&self) -> ExitReason {
            // SAFETY: within the mapping, which is page-aligned; the kernel writes to it only while the guest runs.
            ExitReason(unsafe { self.at.byte_add(EXIT_REASON_OFFSET).cast::<u32>().read_volatile() })
        }
    }

    impl Drop for KvmRun {
        fn drop(&mut self) {
            // SAFETY: the mapping is ours, and there are no references into it.
            unsafe { libc::munmap(self.at, self.size) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explains_exit_reasons() {
        assert_eq!(check_exit_reason(EXIT_HLT), Ok(()));
        assert!(check_exit_reason(EXIT_INTERNAL_ERROR).unwrap_err().contains("ordinary instruction"));
        assert!(check_exit_reason(ExitReason(8)).unwrap_err().contains('8'));
    }

    #[test]
    fn probe_fails_without_hardware_virtualization() {
        let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let capable = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
        let probed = probe();
        assert!(capable || probed.is_err(), "the CPU has no hardware virtualization");
        assert_eq!(probed == Err(KvmError::NoDevice), !std::path::Path::new(KVM_DEVICE).exists());
    }

    #[test]
    fn rejects_a_file_that_is_not_kvm() {
        let file = File::open("/dev/null").unwrap();
        assert!(run(&file).is_err());
    }
}
