//! Whether guests really run under KVM here. That it can be opened tells nothing: nested, it may only pretend, and a
//! guest then crawls or dies at the first instruction that is not emulated. So the smallest of guests is run.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::sync::mpsc;
use std::time::Duration;

const DEVICE: &str = "/dev/kvm";

/// A guest of two instructions takes a millisecond.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why guests do not run under KVM, if they do not.
pub(crate) fn probe() -> Result<(), String> {
    let opened = OpenOptions::new().read(true).write(true).open(DEVICE);
    let kvm = opened.map_err(|error| match error.kind() {
        ErrorKind::NotFound => format!("{DEVICE} is missing"),
        _ => format!("{DEVICE} cannot be opened: {error}"),
    })?;
    let failed = |why: &dyn std::fmt::Display| format!("a test guest did not run: {why}");
    let (answer, answered) = mpsc::channel();
    // In a thread of its own, should it never come back.
    let run = std::thread::Builder::new().name("kvm".into()).spawn(move || answer.send(run(&kvm)));
    run.map_err(|error| failed(&error))?;
    match answered.recv_timeout(PATIENCE) {
        Ok(Ok(exit)) => judge(exit).map_err(|why| failed(&why)),
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(failed(&"it did not come to its end")),
    }
}

/// Why a guest left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Exit(u32);

fn judge(exit: Exit) -> Result<(), String> {
    match exit {
        Exit(5) => Ok(()),
        Exit(17) => Err("the kernel cannot carry out an ordinary instruction".into()),
        Exit(9) => Err("the processor refused to enter it".into()),
        Exit(other) => Err(format!("it left for reason {other}")),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn run(_: &File) -> io::Result<Exit> {
    Err(io::Error::new(ErrorKind::Unsupported, "only known on x86-64"))
}

#[cfg(target_arch = "x86_64")]
fn run(kvm: &File) -> io::Result<Exit> {
    guest::run(kvm)
}

/// The system calls.
#[cfg(target_arch = "x86_64")]
mod guest {
    #![expect(unsafe_code, reason = "KVM has no safe interface in the libraries we have")]

    use std::fs::File;
    use std::io;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::ptr;

    use nix::libc;

    use super::Exit;

    const CREATE_VM: libc::c_ulong = 0xae01;
    const RUN_SIZE: libc::c_ulong = 0xae04;
    const CREATE_VCPU: libc::c_ulong = 0xae41;
    const SET_MEMORY: libc::c_ulong = 0x4020_ae46;
    const RUN: libc::c_ulong = 0xae80;
    const SET_REGISTERS: libc::c_ulong = 0x4090_ae82;
    const GET_SPECIAL: libc::c_ulong = 0x8138_ae83;
    const SET_SPECIAL: libc::c_ulong = 0x4138_ae84;

    const MEMORY: usize = 64 << 10;

    /// Where the reason is in what the kernel shares.
    const REASON: usize = 8;

    /// `pxor xmm0, xmm0; hlt`: a hypervisor that only emulates knows the second, but not the first.
    const PROGRAM: [u8; 5] = [0x66, 0x0f, 0xef, 0xc0, 0xf4];

    #[repr(C, align(4096))]
    struct Memory([u8; MEMORY]);

    #[repr(C)]
    struct Slot {
        slot: u32,
        flags: u32,
        guest_address: u64,
        size: u64,
        address: u64,
    }

    /// As the kernel has them: 16 general registers, the instruction pointer, the flags.
    #[repr(C)]
    struct Registers([u64; 18]);

    /// Segments, tables, control registers: 39 times 8 bytes, of which few matter here.
    #[repr(C)]
    struct Special([u64; 39]);

    const CR0: usize = 28;
    const CR4: usize = 31;

    /// Calls with a number.
    fn call(file: &File, request: libc::c_ulong, argument: libc::c_ulong) -> io::Result<libc::c_int> {
        // SAFETY: the requests that are made with this take numbers.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }

    /// Calls with something that the kernel reads or fills.
    fn call_with<T>(file: &File, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is made with the type whose size it has in its upper half.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), request, ptr::from_mut(argument)) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn opened(fd: libc::c_int) -> File {
        // SAFETY: the kernel just made it, for us alone.
        unsafe { File::from_raw_fd(fd) }
    }

    pub(super) fn run(kvm: &File) -> io::Result<Exit> {
        // Before the guest, so that it outlives it.
        let mut memory = Box::new(Memory([0; MEMORY]));
        memory.0[..PROGRAM.len()].copy_from_slice(&PROGRAM);
        let vm = opened(call(kvm, CREATE_VM, 0)?);
        let address = ptr::from_mut(&mut *memory).addr() as u64;
        let mut slot = Slot { slot: 0, flags: 0, guest_address: 0, size: MEMORY as u64, address };
        call_with(&vm, SET_MEMORY, &mut slot)?;
        let cpu = opened(call(&vm, CREATE_VCPU, 0)?);

        let mut special = Special([0; 39]);
        call_with(&cpu, GET_SPECIAL, &mut special)?;
        // The code segment begins at 0: its base, and its selector in the middle of the next word.
        special.0[0] = 0;
        special.0[1] &= !(0xffff << 32);
        // With a coprocessor, which is not to be emulated, and its instructions allowed.
        special.0[CR0] = (special.0[CR0] | 0x2) & !0x4;
        special.0[CR4] |= 0x600;
        call_with(&cpu, SET_SPECIAL, &mut special)?;
        let mut registers = Registers([0; 18]);
        // One bit of the flags is always set.
        registers.0[17] = 2;
        call_with(&cpu, SET_REGISTERS, &mut registers)?;

        let shared = Shared::new(&cpu, call(kvm, RUN_SIZE, 0)?)?;
        loop {
            match call(&cpu, RUN, 0) {
                Ok(_) => return Ok(shared.reason()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// What the kernel shares of a processor.
    struct Shared {
        at: *mut libc::c_void,
        size: usize,
    }

    impl Shared {
        fn new(cpu: &File, size: libc::c_int) -> io::Result<Self> {
            let size = usize::try_from(size).ok().filter(|size| *size >= REASON + 4);
            let size = size.ok_or(io::ErrorKind::InvalidData)?;
            // SAFETY: a new mapping wherever there is room.
            let at = unsafe {
                libc::mmap(ptr::null_mut(), size, libc::PROT_READ, libc::MAP_SHARED, cpu.as_raw_fd(), 0)
            };
            if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { at, size }) }
        }

        fn reason(&self) -> Exit {
            // SAFETY: within the mapping, which is aligned to pages; the kernel writes it only while the guest runs.
            Exit(unsafe { self.at.byte_add(REASON).cast::<u32>().read_volatile() })
        }
    }

    impl Drop for Shared {
        fn drop(&mut self) {
            // SAFETY: what was mapped, and nobody has a reference into it.
            unsafe { libc::munmap(self.at, self.size) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_in_words() {
        assert_eq!(judge(Exit(5)), Ok(()));
        assert!(judge(Exit(17)).unwrap_err().contains("ordinary instruction"));
        assert!(judge(Exit(8)).unwrap_err().contains('8'));
    }

    #[test]
    fn a_machine_without_virtualisation_does_not_pass() {
        let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let capable = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
        match probe() {
            Ok(()) => assert!(capable, "no processor of this machine can do that"),
            Err(why) => {
                let known = ["is missing", "cannot be opened", "a test guest did not run: "];
                assert!(known.iter().any(|words| why.contains(words)), "{why}");
            }
        }
    }

    #[test]
    fn what_is_no_hypervisor_is_an_error() {
        let file = File::open("/dev/null").unwrap();
        assert!(run(&file).is_err());
    }
}
