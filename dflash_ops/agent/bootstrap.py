"""The few lines that receive the agent on the host.

BOOTSTRAP is one argv element of `PYTHON -I -S -c BOOTSTRAP NONCE SIZE SHA256 WORKDIR [--beat S]` and passes ssh,
sudo and `pct exec`: so it is one line with no double quote, backslash, dollar sign, backtick or exclamation mark.
Statements joined by `;` allow no `try`, hence the excepthook; BufferedReader with a buffer of one byte
reads exactly what is asked for and leaves the frames that follow on fd 0. It runs on Python 3.4 and newer, so that an
old Python is told what is wrong.
"""

from __future__ import annotations

READY = "DFLASH-OPS"
REFUSED = "DFLASH-OPS-REFUSED"

_STATEMENTS = (
    "import hashlib,io,json,os,sys",
    "nonce,size,digest,work=sys.argv[1:5]",
    "work=os.path.abspath(os.path.expanduser(work))",
    "code,fix=5,'choose a python of 3.9 or newer for this host'",
    "part=os.devnull",
    "named=lambda error:error.strerror+': '+str(error.filename) if error.filename else error.strerror",
    "said=lambda kind,error:named(error) if getattr(error,'strerror',None) else str(error) if kind is AssertionError "
    "else kind.__name__+': '+str(error)",
    "sys.excepthook=lambda kind,error,trace:(part is os.devnull or os.path.exists(part) and os.unlink(part),"
    "print(chr(10)+'DFLASH-OPS-REFUSED',nonce,json.dumps(dict("
    "kind='bootstrap',what=said(kind,error),where='starting the agent in '+work,fix=fix,exit=code,"
    "evidence=None)),flush=True))",
    "assert sys.version_info>=(3,9),'the agent needs Python 3.9 or newer, '+sys.executable+' is '"
    "+sys.version.split()[0]",
    "code,fix=4,'run the command again'",
    "data=io.BufferedReader(io.FileIO(0,closefd=False),1).read(int(size))",
    "assert hashlib.sha256(data).hexdigest()==digest,'the agent arrived damaged: '+str(len(data))+' of '+size+' bytes'",
    "code,fix=5,'check the work directory: it must be writable and have space'",
    "os.umask(63)",
    "folder=os.path.join(work,'agent')",
    "os.makedirs(folder,exist_ok=True)",
    # whoever may write there could put another agent in our place; a sticky bit keeps what is ours
    "mode=os.stat(work).st_mode",
    "code,fix=5,'name a folder of its own as workdir, or there: chmod o-w '+work",
    "assert not mode&2 or mode&512 and os.stat(folder).st_uid==os.geteuid(),"
    "'everybody may write to the work directory '+work",
    "code,fix=5,'check the work directory: it must be writable and have space'",
    "path=os.path.join(folder,digest+'.pyz')",
    # on a full or read-only disk the file that is there must do
    "same=os.path.exists(path) and hashlib.sha256(open(path,'rb').read()).hexdigest()==digest",
    "part=os.devnull if same else path+'.'+str(os.getpid())",
    "file=open(part,'wb')",
    "file.write(data)",
    "file.flush()",
    "same or os.fsync(file.fileno())",
    "file.close()",
    "same or os.replace(part,path)",
    # compiled.py
    "begin=digest+'.'+str(sys.implementation.cache_tag)+'.'",
    "fast=[name for name in os.listdir(folder) if name.startswith(begin) and name.endswith('.pyz')]",
    "fast=[os.path.join(folder,name) for name in fast]",
    "fast=[name for name in fast if hashlib.sha256(open(name,'rb').read()).hexdigest()==name.split('.')[-2]]",
    "os.execv(sys.executable,[sys.executable,'-I','-S',(fast+[path])[0],'serve',nonce,work]+sys.argv[5:])",
)
BOOTSTRAP = ";".join(_STATEMENTS)
